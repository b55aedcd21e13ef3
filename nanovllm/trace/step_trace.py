"""What one step of the engine did, as plain data.

A `Trace` is a list of `StepTrace`s and what they have in common. Everything in it is a number, a
string, or a list, dict or dataclass of these, so that it survives JSON (`Trace.to_jsonl`,
`Trace.from_jsonl`) and every view of it (text, HTML, Perfetto) can be drawn without the engine.

Reading one step, top to bottom, is reading the engine's own loop:

    before      the queues, as schedule() found them
    scheduled   its decision: tokens, blocks, who came, who had to go        (SchedulerOutput)
    events      the same, told one by one: hit, allocate, evict, preempt ... finish
    pool        every block right after schedule()
    batch       the packed tokens that the model ran on                      (_prepare_inputs)
    sampling    how the watched request's next token was chosen              (Sampler)
    sampled     the tokens
    after       the queues, when update_from_output() was done
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nanovllm.v1.metrics.perf import ModelShape

# Raised when a field changes its meaning or goes away; new fields with defaults do not count.
TRACE_VERSION = 1


@dataclass
class RequestState:
    """One unfinished request, before or after a step."""

    request_id: str
    status: str  # RequestStatus: WAITING, RUNNING, PREEMPTED
    num_computed_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    # Async scheduling: output tokens that are being computed and whose values are not known yet.
    num_output_placeholders: int = 0
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass
class Queues:
    """Who runs and who waits, in the scheduler's order."""

    running: list[RequestState]
    waiting: list[RequestState]

    def find(self, request_id: str) -> RequestState | None:
        both = self.running + self.waiting
        return next((r for r in both if r.request_id == request_id), None)


@dataclass
class ScheduledRequest:
    """One request's share of the step."""

    request_id: str
    kind: str  # "new", "running" or "resumed"
    num_scheduled_tokens: int
    start: int  # the first token it computes: num_computed_tokens before the step
    num_cached_tokens: int  # new and resumed: the prefix-cache hit; running: 0
    block_ids: list[int]  # its whole block table
    new_block_ids: list[int]  # those of it that were allocated in this step


@dataclass
class Scheduled:
    """SchedulerOutput, digested. `requests` is in scheduling order."""

    token_budget: int  # max_num_batched_tokens
    total_num_scheduled_tokens: int
    requests: list[ScheduledRequest]
    preempted_req_ids: list[str]
    finished_req_ids: list[str]  # ended since the step before; the runner forgets them


@dataclass
class Event:
    """Something that happened in the step, in order.

    kind        block_ids                                        num_tokens
    hit         found in the prefix cache, taken                 tokens in them
    allocate    taken off the free queue                         tokens the request computes now
    store       published: can be found from now on              tokens in them
    evict       content forgotten                                tokens in them
    preempt     given back by a request sent back to wait        computed tokens lost
    finish      given back by a request that has ended           its output tokens
    clear       (the whole prefix cache was forgotten)
    """

    kind: str
    request_id: str | None = None
    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    detail: str = ""
    phase: str = "schedule"  # or "update": when the result was taken in, after `pool` was noted


@dataclass
class BlockState:
    """One block of the KV cache. Held by nobody and not in the tree: free."""

    block_id: int
    ref_cnt: int
    held_by: list[str]  # requests whose block table it is in
    block_hash: str | None  # the first digits; None: it cannot be found by content
    in_tree: bool = False  # the radix tree holds it
    free_position: int | None = None  # 0: taken next
    is_null: bool = False

    @property
    def state(self) -> str:
        """ "null", "held", "cached" (by nobody held, but findable) or "free"."""
        if self.is_null:
            return "null"
        if self.held_by:
            return "held"
        return "cached" if self.block_hash is not None or self.in_tree else "free"


@dataclass
class PoolState:
    """The block pool. A large one lists only blocks that are held, cached or next in line."""

    num_blocks: int  # the null block included
    block_size: int
    num_free: int  # in the free queue
    num_held: int  # in some block table
    usage: float  # as the engine reports it: the share that requests hold
    blocks: list[BlockState]  # by block_id

    @property
    def num_cached(self) -> int:
        """Of the blocks listed, those that nobody holds but a later request may hit."""
        return sum(block.state == "cached" for block in self.blocks)


@dataclass
class PackedBatch:
    """The model's inputs. Row i is request req_ids[i], tokens query_start_loc[i] to [i + 1]."""

    req_ids: list[str]
    input_ids: list[int]
    input_texts: list[str]  # empty without a tokenizer
    positions: list[int]
    slot_mapping: list[int]
    query_start_loc: list[int]
    seq_lens: list[int]
    samples: list[bool]  # by row; False: a chunk, its logits are dropped


@dataclass
class SampledTokens:
    request_id: str
    token_ids: list[int]
    text: str = ""
    finish_reason: str | None = None


@dataclass
class TokenProb:
    token_id: int
    text: str
    probs: list[float]  # one a stage; 0.0: cut


@dataclass
class SamplingStage:
    """The distribution after one step of the sampler."""

    name: str  # "model", "processors", "temperature", "min_p", "top_k", "top_p", "greedy"
    setting: str  # the parameter, such as "k = 50"
    num_tokens: int  # with a probability above 0
    total: float  # their sum: 1, up to rounding
    entropy: float  # bits


@dataclass
class SamplingTrace:
    """How one request's token was chosen."""

    request_id: str
    stages: list[SamplingStage]
    tokens: list[TokenProb]  # the likeliest, and the one sampled
    sampled_token_id: int | None = None


@dataclass
class Span:
    """A stretch of time, with what it consists of. Microseconds of the trace's clock; a tick is a
    logical time, one more at every beginning and end."""

    name: str
    start: float
    end: float
    start_tick: int
    end_tick: int
    children: list[Span] = field(default_factory=list)

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass
class StepTrace:
    """One step. The module's docstring says in which order to read it.

    With async scheduling step n + 1 is planned before step n's result is taken in: then `spans` has
    two parts, "plan" and "update step", and `after` shows what step n + 1 has already done.
    """

    step: int  # from 1
    before: Queues
    scheduled: Scheduled
    events: list[Event]
    pool: PoolState
    batch: PackedBatch | None  # None: nothing was scheduled
    sampled: list[SampledTokens]
    sampling: list[SamplingTrace]
    after: Queues
    num_free_after: int  # blocks in the free queue
    spans: list[Span]  # schedule, execute, sample and update, nested
    version: int = TRACE_VERSION

    def span(self, name: str) -> Span:
        """The span of that name, at whatever depth."""
        stack = list(self.spans)
        while stack:
            span = stack.pop()
            if span.name == name:
                return span
            stack.extend(span.children)
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepTrace:
        return _decode(cls, data)


@dataclass
class RequestInfo:
    """One request over the whole trace. Times in microseconds of the trace's clock."""

    request_id: str
    prompt: str
    num_prompt_tokens: int
    arrival_step: int  # it could first be scheduled in this step
    arrival: float
    token_times: list[float] = field(default_factory=list)  # one an output token
    token_steps: list[int] = field(default_factory=list)  # the step that sampled it
    text: str = ""
    finish_reason: str | None = None


@dataclass
class EngineInfo:
    """What the steps have in common."""

    model: str
    device: str
    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    prefix_cache_backend: str  # "hash", "radix" or "off"
    policy: str
    async_scheduling: bool
    # What a step's operations and bytes follow from; None, "": the trace is older than these.
    dtype: str = ""
    model_shape: ModelShape | None = None


@dataclass
class Trace:
    """A run: the engine, its requests, its steps."""

    engine: EngineInfo
    requests: list[RequestInfo] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)
    version: int = TRACE_VERSION

    def __iter__(self) -> Iterator[StepTrace]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> StepTrace:
        return self.steps[index]

    def to_jsonl(self) -> str:
        """The first line is about the run, each further one is a step."""
        head = {"version": self.version, "engine": asdict(self.engine)}
        head["requests"] = [asdict(request) for request in self.requests]
        lines = [head, *(step.to_dict() for step in self.steps)]
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    @classmethod
    def from_jsonl(cls, text: str) -> Trace:
        """Undo `to_jsonl`.

        Raises:
            ValueError: it is not a trace, or one of another version.
        """
        # Not splitlines(): texts may hold separators that JSON leaves as they are.
        lines = [json.loads(line) for line in text.split("\n") if line.strip()]
        if not lines or not isinstance(lines[0], dict) or "engine" not in lines[0]:
            raise ValueError("this is not a trace: its first line has no engine")
        if lines[0].get("version") != TRACE_VERSION:
            version = lines[0].get("version")
            raise ValueError(f"the trace is of version {version}, expected {TRACE_VERSION}")
        return _decode(cls, {**lines[0], "steps": lines[1:]})

    def save_jsonl(self, path: str | Path) -> None:
        Path(path).write_text(self.to_jsonl(), encoding="utf-8")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(kind: Any, value: Any) -> Any:
    """Rebuild dataclasses out of what JSON has made of them."""
    origin = typing.get_origin(kind)
    if origin is list:
        (item,) = typing.get_args(kind)
        return [_decode(item, part) for part in value]
    if origin is types.UnionType:
        if value is None:
            return None
        (kind,) = (arg for arg in typing.get_args(kind) if arg is not types.NoneType)
        return _decode(kind, value)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        known = [f.name for f in fields(kind) if f.name in value]
        return kind(**{name: _decode(hints[name], value[name]) for name in known})
    return value
