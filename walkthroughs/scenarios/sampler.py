"""Four requests with one history and four wishes, over a vocabulary of five tokens. No model.

The logits are multiples of ln 2, so that every weight exp(logit) is a power of two.
"""

from math import log

import torch

from nanovllm import SamplingParams
from nanovllm.v1.sample.logits_processor import build_logitsprocs
from nanovllm.v1.sample.sampler import Sampler
from nanovllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

VOCAB = ("cat", "dog", "mat", "hat", "rat")
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -1.0]) * log(2)
PROMPT, OUTPUT = ["rat"], ["cat", "cat"]
PENALTIES = {
    "repetition_penalty": 2.0,
    "frequency_penalty": 1.5 * log(2),
    "presence_penalty": log(2),
}
REQUESTS = {
    "greedy": SamplingParams(temperature=0, logprobs=2, **PENALTIES),
    "narrow": SamplingParams(
        temperature=0.5, min_p=0.01, top_k=3, top_p=0.95, seed=8, logprobs=2, **PENALTIES
    ),
    "plain": SamplingParams(temperature=1.0, seed=8),
    "ties": SamplingParams(temperature=1.0, top_k=4, seed=10),
}


def make_batch(names: list[str]) -> InputBatch:
    """The rows as the model runner keeps them; none has a block, for nothing is computed."""
    batch = InputBatch(
        max_num_reqs=4,
        max_model_len=8,
        max_num_batched_tokens=8,
        device=torch.device("cpu"),
        pin_memory=False,
        vocab_size=len(VOCAB),
        block_size=4,
        logitsprocs=build_logitsprocs(4, torch.device("cpu")),
    )
    prompt, output = ([VOCAB.index(word) for word in words] for words in (PROMPT, OUTPUT))
    for name in names:
        batch.add_request(
            CachedRequestState(name, prompt, REQUESTS[name], [], 2, output_token_ids=list(output))
        )
    batch.refresh_metadata()
    return batch


def sample(sampler: Sampler, names: list[str], position: int) -> list[str]:
    """One step's sampling: the same logits for every row."""
    metadata = make_batch(names).sampling_metadata
    metadata.positions = torch.full((len(names),), position)
    output = sampler(LOGITS.repeat(len(names), 1), metadata)
    return [VOCAB[token] for token in output.sampled_token_ids.flatten().tolist()]


def main() -> None:
    sampler = Sampler(seed=2)
    position = len(PROMPT) + len(OUTPUT)
    together = sample(sampler, list(REQUESTS), position)
    alone = sample(sampler, ["narrow"], position)
    elsewhere = sample(sampler, ["plain", "ties", "greedy", "narrow"], position)
    later = [sample(sampler, ["narrow"], position + n)[0] for n in range(1, 9)]
    only_greedy = sample(sampler, ["greedy"], position)
    print("together:", dict(zip(REQUESTS, together, strict=True)))
    print(f"narrow alone: {alone}, elsewhere: {elsewhere}, at later positions: {later}")
    print("greedy alone:", only_greedy)


if __name__ == "__main__":
    main()
