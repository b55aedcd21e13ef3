"""Compare the whole engine with transformers: logits and greedy tokens."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from nanovllm import LLM, SamplingParams
from nanovllm.v1.outputs import SamplerOutput
from nanovllm.v1.sample.metadata import SamplingMetadata

LOGITS_TOLERANCE = 1e-4
TIE = 1e-5


class RecordingSampler(nn.Module):
    """The engine's sampler; keeps logits by request and position of the predicted token."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.runner = llm.llm_engine.engine_core.engine_core.model_executor.model_runner
        self.inner = self.runner.sampler
        self.runner.sampler = self
        self.logits: dict[tuple[str, int], torch.Tensor] = {}

    def forward(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        runner = self.runner
        for row, req_id in enumerate(runner.input_batch.req_ids):
            if not runner.discard_request_mask[row]:
                position = int(runner.sampling_positions.np[row])
                self.logits[req_id, position] = logits[row].detach().clone()
        return self.inner(logits, metadata)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@dataclass
class Comparison:
    """How close a run came to transformers."""

    num_tokens: int = 0
    max_logit_difference: float = 0.0
    num_ties: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0


@torch.no_grad()
def compare_with_transformers(
    llm: LLM,
    hf_model: PreTrainedModel,
    prompts: list[list[int]],
    max_tokens: int,
    tolerance: float = LOGITS_TOLERANCE,
) -> Comparison:
    """Generate greedily, and check every token and its logits against one forward pass of
    transformers over prompt and output.

    If each token is the argmax of transformers' logits after the tokens before it, then greedy
    search by transformers gives the same tokens. Where the two best logits lie within TIE, either
    is right; that is said in a warning.
    """
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    result = Comparison()

    def count_preemptions(*args: Any) -> None:
        result.num_preemptions += 1
        preempt(*args)

    scheduler._preempt_request = count_preemptions
    recorder = RecordingSampler(llm)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
    finally:
        recorder.runner.sampler = recorder.inner
        scheduler._preempt_request = preempt

    recorded: dict[str, dict[int, torch.Tensor]] = {}
    for (req_id, position), logits in recorder.logits.items():
        recorded.setdefault(req_id, {})[position] = logits
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == max_tokens
        result.num_cached_tokens += output.num_cached_tokens or 0
        theirs = hf_model(torch.tensor([prompt + tokens])).logits[0]
        ours = recorded[output.request_id]
        assert set(ours) == set(range(len(prompt), len(prompt) + len(tokens)))
        for i, token in enumerate(tokens, start=len(prompt)):
            expected = theirs[i - 1]
            difference = (ours[i] - expected).abs().max().item()
            assert difference <= tolerance, f"position {i}: logits differ by {difference}"
            gap = (expected.max() - expected[token]).item()
            assert gap <= TIE, f"position {i}: {token} instead of {expected.argmax()}, gap {gap}"
            if token != expected.argmax():
                result.num_ties += 1
                warnings.warn(f"position {i}: two logits tie within {TIE}", stacklevel=1)
            result.max_logit_difference = max(result.max_logit_difference, difference)
            result.num_tokens += 1
    return result
