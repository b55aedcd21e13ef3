"""What a user gets back: one RequestOutput a prompt, holding one CompletionOutput a sample.

Upstream: vllm/outputs.py (0.23.0)
Left out: pooling, LoRA, encoder prompts, routed experts, KV-transfer parameters, and
`RequestOutput.add` (merging of streamed pieces when their reader is slower than the engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.logprobs import PromptLogprobs, SampleLogprobs
from nanovllm.v1.metrics.stats import RequestStateStats


@dataclass
class CompletionOutput:
    """One sample of a request (a request has `SamplingParams.n` of them).

    Attributes:
        index: which of the n samples this is.
        text: generated text; in DELTA mode, only what is new.
        token_ids: generated token ids, those of a stop string or stop token included.
        cumulative_logprob: sum of the sampled tokens' logprobs; None unless logprobs were asked
            for.
        logprobs: per token, the most likely candidates; None unless asked for.
        finish_reason: "stop", "length", "abort" or "error"; None while running.
        stop_reason: the stop string or stop token id that ended it; None for EOS and all other
            ends.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """What is known about a request after a step.

    Attributes:
        request_id: the id given to `add_request`.
        prompt: its text; None if it came as token ids only.
        prompt_token_ids: its token ids.
        prompt_logprobs: per prompt token, as for CompletionOutput.logprobs; the first entry is
            None.
        outputs: the samples; while streaming, those that changed in this step.
        finished: True once every sample has ended.
        metrics: the request's moments (see RequestStateStats); None with disable_log_stats. With n
            > 1, those of the sample that ended last.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache; for n > 1, those of
            the sample that ended last (which may have shared a sibling's).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    num_cached_tokens: int | None = None
