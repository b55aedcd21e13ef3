"""How the sampler gets from logits to a token, looked at stage by stage.

The sampler itself keeps nothing but the token. Here its own functions are applied once more to a
copy of the logits, one at a time and in its order, and the distribution is noted after each. No
random number is drawn: a traced run samples the tokens that it would have sampled anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nanovllm.sampling_params import SAMPLING_EPS
from nanovllm.trace.step_trace import SamplingStage, SamplingTrace, TokenProb
from nanovllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from nanovllm.v1.sample.metadata import SamplingMetadata
from nanovllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from nanovllm.v1.sample.sampler import Sampler

NUM_TOKENS_SHOWN = 8

# (name, its parameter as text, [vocab_size] probabilities)
Stage = tuple[str, str, torch.Tensor]


def sampling_stages(
    sampler: Sampler, logits: torch.Tensor, metadata: SamplingMetadata, row: int
) -> list[Stage]:
    """What one row's distribution looks like after each stage that changes it.

    Args:
        logits: [num_reqs, vocab_size], as the model returned them; not changed.
        row: whose distribution.
    """
    stages: list[Stage] = []

    def note(name: str, setting: str) -> None:
        stages.append((name, setting, logits[row].softmax(dim=-1)))

    logits = logits.to(torch.float32, copy=True)
    before = logits[row].clone()
    note("model", "")
    logits = sampler.apply_logits_processors(logits, metadata)
    if not torch.equal(before, logits[row]):
        note("processors", "")

    temperature = metadata.temperature
    if temperature is None or temperature[row] < SAMPLING_EPS:
        best = sampler.greedy_sample(logits)[row]
        one_hot = torch.zeros_like(logits[row])
        one_hot[best] = 1.0
        return [*stages, ("greedy", "temperature = 0", one_hot)]

    logits = sampler.apply_temperature(logits, temperature, metadata.all_random)
    note("temperature", f"T = {temperature[row]:g}")
    for processor in metadata.logitsprocs.argmax_invariant:
        logits = processor.apply(logits)
        if isinstance(processor, MinPLogitsProcessor) and processor.get_min_p_by_index(row) > 0:
            note("min_p", f"{processor.get_min_p_by_index(row):g}")
    k, p = metadata.top_k, metadata.top_p
    # Top-p counts within what top-k has left, so the two are applied as the sampler does it.
    unfiltered = logits.clone()
    if k is not None and k[row] < logits.shape[1]:
        logits = apply_top_k_top_p(unfiltered.clone(), k, None)
        note("top_k", f"k = {int(k[row])}")
    if p is not None and p[row] < 1:
        logits = apply_top_k_top_p(unfiltered.clone(), k, p)
        note("top_p", f"p = {p[row]:g}")
    return stages


def trace_sampling(
    request_id: str, stages: Sequence[Stage], decode: Callable[[int], str]
) -> SamplingTrace:
    """Put the stages into plain numbers, for the tokens that the model thinks likeliest."""
    model_probs = stages[0][2]
    token_ids = model_probs.topk(min(NUM_TOKENS_SHOWN, len(model_probs))).indices.tolist()
    # Processors may have lifted others above them.
    last = stages[-1][2]
    token_ids += [i for i in last.topk(3).indices.tolist() if last[i] > 0 and i not in token_ids]
    return SamplingTrace(
        request_id=request_id,
        stages=[_summarise(name, setting, probs) for name, setting, probs in stages],
        tokens=[token_prob(stages, token_id, decode) for token_id in token_ids],
    )


def token_prob(stages: Sequence[Stage], token_id: int, decode: Callable[[int], str]) -> TokenProb:
    return TokenProb(token_id, decode(token_id), [float(probs[token_id]) for _, _, probs in stages])


def _summarise(name: str, setting: str, probs: torch.Tensor) -> SamplingStage:
    kept = probs[probs > 0].to(torch.float64)
    return SamplingStage(
        name=name,
        setting=setting,
        num_tokens=kept.numel(),
        total=float(kept.sum()),
        entropy=float(-(kept * kept.log2()).sum()) + 0.0,  # + 0.0: no minus zero
    )
