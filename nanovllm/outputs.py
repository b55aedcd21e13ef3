"""What a user gets back: one RequestOutput a prompt, holding one CompletionOutput a sample.

Upstream: vllm/outputs.py (0.23.0)
Left out: pooling, LoRA, encoder prompts, routed experts, KV-transfer parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    def joined_with(self, later: CompletionOutput) -> CompletionOutput:
        """Two deltas of one sample as one."""
        logprobs = self.logprobs
        if later.logprobs is not None:
            logprobs = [*(logprobs or ()), *later.logprobs]
        return replace(
            later,
            text=self.text + later.text,
            token_ids=[*self.token_ids, *later.token_ids],
            logprobs=logprobs,
        )


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

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Take in a later output of the same request: its reader is slower than the engine.

        Args:
            aggregate: samples are joined (deltas); else the later replaces the earlier.
        """
        self.finished |= next_output.finished
        self.prompt_logprobs = self.prompt_logprobs or next_output.prompt_logprobs
        self.metrics = next_output.metrics
        self.num_cached_tokens = next_output.num_cached_tokens
        by_index = {completion.index: i for i, completion in enumerate(self.outputs)}
        for completion in next_output.outputs:
            i = by_index.get(completion.index)
            if i is None:
                self.outputs.append(completion)
            elif aggregate:
                self.outputs[i] = self.outputs[i].joined_with(completion)
            else:
                self.outputs[i] = completion
