"""A request as the scheduler sees it: its tokens, and how many of them have been computed.

Upstream: vllm/v1/request.py (0.23.0)
Left out: multimodal features, pooling, LoRA, structured output, streaming input, remote KV
transfer.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanovllm.v1.engine import EngineCoreEvent, EngineCoreEventType, FinishReason
from nanovllm.v1.metrics.stats import PrefillStats

if TYPE_CHECKING:
    import torch

    from nanovllm.sampling_params import SamplingParams
    from nanovllm.v1.core.kv_cache_utils import BlockHash
    from nanovllm.v1.engine import EngineCoreRequest


class RequestStatus(enum.IntEnum):
    """Where a request stands. Everything after PREEMPTED is final."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        return status > RequestStatus.PREEMPTED

    @staticmethod
    def get_finished_reason(status: RequestStatus) -> FinishReason | None:
        return _FINISHED_REASON_MAP.get(status)


_FINISHED_REASON_MAP = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


class Request:
    """One request. There is no prefill phase and no decode phase, only catching up:

        all_token_ids   p p p p p p p p o o o .        p: prompt, o: output
                        |-- computed --|               num_computed_tokens = 6
                                       |-- todo --|    num_tokens - num_computed_tokens = 5

    A new request has its whole prompt to do, a decoding one its newest token, a preempted one
    everything, outputs included.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        block_hasher: Callable[[Request], list[BlockHash]] | None = None,
        prompt_embeds: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            sampling_params: `max_tokens` must be set.
            arrival_time: seconds; breaks ties between equal priorities.
            block_hasher: None when prefix caching is off.
            prompt_embeds: what the prompt really is, its ids all 0; for the runner.
        """
        assert sampling_params.max_tokens is not None
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.prompt_embeds = prompt_embeds
        self.sampling_params = sampling_params
        self.max_tokens: int = sampling_params.max_tokens
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.cache_salt = cache_salt
        self.priority = priority

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] = []
        self.num_preemptions = 0
        self.prefill_stats: PrefillStats | None = PrefillStats()

        # Grown by append_output_token_ids only, both at once.
        self.output_token_ids: list[int] = []
        self.all_token_ids: list[int] = prompt_token_ids.copy()
        self.num_prompt_tokens = len(prompt_token_ids)

        # Tokens whose keys and values are in the cache, or will be once the steps scheduled so far
        # have run. Set by the scheduler alone.
        self.num_computed_tokens = 0
        # Async scheduling: output tokens that are being computed and whose values are not known
        # yet.
        self.num_output_placeholders = 0
        # The step scheduled last leaves part of the known tokens to do: its sample is dropped.
        # (Read by async scheduling only.)
        self.is_prefill_chunk = False

        # By default so with prompt_logprobs: they need hidden states, which a cached prefix lacks.
        self.skip_reading_prefix_cache = bool(sampling_params.skip_reading_prefix_cache)
        self._block_hasher = block_hasher
        self.block_hashes: list[BlockHash] = []
        self.update_block_hashes()

    @classmethod
    def from_engine_core_request(
        cls,
        request: EngineCoreRequest,
        block_hasher: Callable[[Request], list[BlockHash]] | None,
    ) -> Request:
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            arrival_time=request.arrival_time,
            cache_salt=request.cache_salt,
            priority=request.priority,
            block_hasher=block_hasher,
            prompt_embeds=request.prompt_embeds,
        )

    def append_output_token_ids(self, token_id: int) -> None:
        """Add a sampled token, and hash the block it may have filled."""
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Hash the blocks that have become full."""
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def is_finished(self) -> bool:
        return RequestStatus.is_finished(self.status)

    def get_finished_reason(self) -> FinishReason | None:
        return RequestStatus.get_finished_reason(self.status)

    def record_event(self, event_type: EngineCoreEventType, timestamp: float | None = None) -> None:
        self.events.append(EngineCoreEvent.new_event(event_type, timestamp))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """Events since the last call, or None."""
        if not self.events:
            return None
        events, self.events = self.events, []
        return events

    def take_prefill_stats(self) -> PrefillStats | None:
        """The prompt's statistics, the first time; then None."""
        stats, self.prefill_stats = self.prefill_stats, None
        return stats

    def __lt__(self, other: Request) -> bool:
        """Order of the priority queue: lower priority value, then earlier arrival, then id."""
        return (self.priority, self.arrival_time, self.request_id) < (
            other.priority,
            other.arrival_time,
            other.request_id,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status}, "
            f"computed={self.num_computed_tokens}/{self.num_tokens})"
        )
