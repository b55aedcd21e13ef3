"""The messages between the front end (LLMEngine) and the core (EngineCore).

Upstream: vllm/v1/engine/__init__.py (0.23.0)
Left out: pooling, LoRA, multimodal and data-parallel fields. Upstream's messages are msgspec
structs; these are plain dataclasses, which v1/serial_utils.py puts across a process boundary.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from nanovllm.sampling_params import SamplingParams
    from nanovllm.v1.metrics.stats import PrefillStats, SchedulerStats
    from nanovllm.v1.outputs import LogprobsLists, LogprobsTensors

FINISH_REASON_STRINGS = ("stop", "length", "abort", "error")


class FinishReason(enum.IntEnum):
    """Why a request ended, as in OpenAI's `finish_reason`.

    STOP: an EOS or stop token, or a stop string. LENGTH: max_tokens or max_model_len reached.
    ABORT: the client gave up. ERROR: the core could not take it in (`stop_reason` says why).
    """

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return FINISH_REASON_STRINGS[self.value]


@dataclass
class EngineCoreRequest:
    """A validated, tokenized request on its way to the scheduler."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    cache_salt: str | None = None
    priority: int = 0
    # The id the user knows; request_id may carry a suffix (n > 1: "0_" + id).
    external_req_id: str | None = None
    # [num_prompt_tokens, hidden_size]: takes the place of the token ids, which are then all 0.
    prompt_embeds: torch.Tensor | None = None


class EngineCoreEventType(enum.IntEnum):
    """Moments in a request's life that only the scheduler sees."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


@dataclass
class EngineCoreEvent:
    """`timestamp` is time.monotonic(): compare it with core timestamps only."""

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def new_event(
        cls, event_type: EngineCoreEventType, timestamp: float | None = None
    ) -> EngineCoreEvent:
        return cls(event_type, time.monotonic() if timestamp is None else timestamp)


@dataclass(slots=True)
class EngineCoreOutput:
    """What one step produced for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsTensors | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    # Sent once, with the first output: how the prompt was filled (num_cached_tokens is in it).
    prefill_stats: PrefillStats | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class UtilityOutput:
    """The answer to a call that is no request, such as reset_prefix_cache."""

    call_id: int
    failure_message: str | None = None  # None: it went well, and `result` is what it returned
    result: Any = None


@dataclass
class EngineCoreOutputs:
    """What one step produced for all requests. `timestamp` is time.monotonic() after the step.

    With `utility_output` it is the answer to a call instead.
    """

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


class EngineCoreRequestType(enum.Enum):
    """What a client sends to a core that runs in another thread or process."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"
    SHUTDOWN = b"\x05"
