"""Tracer: stands between EngineCore and its two halves, and writes down what passes.

    EngineCore.step          without a tracer     with one
      scheduler.schedule           Scheduler        Tracer.schedule           -> Scheduler
      executor.execute_model       Worker           Tracer.execute_model      -> GPUModelRunner
      scheduler.update_from_output Scheduler        Tracer.update_from_output -> Scheduler

It makes the same calls in the same order and changes nothing on the way, so a traced run decides
and samples as an untraced one does. What it reads: the scheduler's queues, the KV-cache manager's
block tables and events, and the runner's buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from nanovllm.trace.sampling import Stage, sampling_stages, token_prob, trace_sampling
from nanovllm.trace.step_trace import (
    BlockState,
    Event,
    PackedBatch,
    PoolState,
    Queues,
    RequestState,
    SampledTokens,
    SamplingTrace,
    Scheduled,
    ScheduledRequest,
    Span,
    StepTrace,
)
from nanovllm.v1.core.radix_cache import RadixKVCacheManager

if TYPE_CHECKING:
    from nanovllm.v1.core.kv_cache_manager import KVCacheManager
    from nanovllm.v1.core.sched.output import SchedulerOutput
    from nanovllm.v1.core.sched.scheduler import Scheduler
    from nanovllm.v1.engine import EngineCoreOutputs
    from nanovllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from nanovllm.v1.request import Request
    from nanovllm.v1.worker.gpu_model_runner import GPUModelRunner
    from nanovllm.v1.worker.gpu_worker import Worker

# Pools up to this size are listed whole; of larger ones the blocks that something is to be said of,
# and the first in line.
MAX_BLOCKS_LISTED = 256
NUM_NEXT_LISTED = 16
HASH_DIGITS = 8

# Request id -> the ids in its block table.
Tables = dict[str, list[int]]


class Clock:
    """Microseconds since the trace began, standing still while the tracer itself is at work."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.ticks = 0

    def now(self) -> float:
        return (time.perf_counter() - self._start) * 1e6

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens inside takes no time."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - begin

    @contextmanager
    def span(self, name: str, spans: list[Span]) -> Iterator[None]:
        """Time what happens inside and add it to `spans`."""
        span = Span(name, self.now(), 0.0, self.tick(), 0)
        yield
        span.end, span.end_tick = self.now(), self.tick()
        spans.append(span)

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks


@dataclass
class _StepInFlight:
    """A step that has been planned and whose result is still to come."""

    scheduler_output: SchedulerOutput
    step: StepTrace
    spans: list[Span] = field(default_factory=list)  # schedule, execute, sample; then update
    stages: dict[str, list[Stage]] = field(default_factory=dict)  # of the watched requests


@dataclass
class _Before:
    """What update_from_output is about to change."""

    tables: Tables
    num_output_tokens: dict[str, int]


class Tracer:
    """Makes one StepTrace a step. Between two steps `steps` holds the finished ones.

    With async scheduling a step is finished one call of the engine's `step` after it was planned.
    """

    def __init__(
        self,
        decode: Callable[[int], str] | None = None,
        watch: Collection[str] = (),
        watch_step: Callable[[int], bool] = lambda step: True,
        on_step: Callable[[StepTrace], None] = lambda step: None,
    ) -> None:
        """
        Args:
            decode: a token's text; None: no texts.
            watch: ids of requests whose sampling is to be looked at (or of their parents, where
                n > 1).
            watch_step: in which steps, from 1.
            on_step: is handed every step when it is complete.
        """
        self.clock = Clock()
        self.steps: list[StepTrace] = []
        self.num_planned = 0
        self._decode = decode
        self._texts: dict[int, str] = {}
        self._watch = set(watch)
        self._watch_step = watch_step
        self._on_step = on_step
        self._in_flight: list[_StepInFlight] = []
        self._last_tables: Tables = {}  # as the last call left them
        self._scheduler: Scheduler
        self._model_executor: Worker

    def in_front_of(self, scheduler: Scheduler, model_executor: Worker) -> tuple[Any, Any]:
        """Take the calls for both from here on: stands in for either."""
        self._scheduler, self._model_executor = scheduler, model_executor
        return self, self

    # ---- the calls of a step ---------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Scheduler.schedule, looked at from both sides."""
        with self.clock.stopped():
            before = self._queues()
            tables_before = self._tables()
            ended = self._ended_between_steps()
        spans: list[Span] = []
        with self.clock.span("schedule", spans):
            scheduler_output = self._scheduler.schedule()
        with self.clock.stopped():
            self.num_planned += 1
            scheduled = self._scheduled(scheduler_output)
            kv_events = self._scheduler.kv_cache_manager.take_events()
            step = StepTrace(
                step=self.num_planned,
                before=before,
                scheduled=scheduled,
                events=ended + self._plan_events(scheduled, before, tables_before, kv_events),
                pool=self._pool(),
                batch=None,
                sampled=[],
                sampling=[],
                after=before,  # until it is known
                num_free_after=0,
                spans=[],
            )
            self._in_flight.append(_StepInFlight(scheduler_output, step, spans))
            self._last_tables = self._tables()
        return scheduler_output

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Worker.execute_model: the runner's two halves, with a look at its buffers between."""
        runner, flight = self._model_executor.model_runner, self._find(scheduler_output)
        assert flight is not None  # schedule() has just made it
        with self.clock.span("execute", flight.spans):
            output = runner.execute_model(scheduler_output)
            self._synchronize()
        if output is not None:
            return output
        with self.clock.stopped():
            flight.step.batch = self._batch(runner)
            self._look_at_sampling(runner, flight)
        with self.clock.span("sample", flight.spans):
            return runner.sample_tokens()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Scheduler.update_from_output; the step is complete then."""
        scheduler, flight = self._scheduler, self._find(scheduler_output)
        if flight is None:  # planned before the trace began
            return scheduler.update_from_output(scheduler_output, model_runner_output)
        requests = scheduler.requests
        with self.clock.stopped():
            before = _Before(self._tables(), {i: r.num_output_tokens for i, r in requests.items()})
        with self.clock.span("update", flight.spans):
            outputs = scheduler.update_from_output(scheduler_output, model_runner_output)
        with self.clock.stopped():
            self._complete(flight, outputs, before)
        return outputs

    def _synchronize(self) -> None:
        """Wait for a GPU, so that the model's time is not booked on sampling."""
        if self._model_executor.device.type == "cuda":
            torch.cuda.synchronize(self._model_executor.device)

    def _find(self, scheduler_output: SchedulerOutput) -> _StepInFlight | None:
        same = (f for f in self._in_flight if f.scheduler_output is scheduler_output)
        return next(same, None)

    def _complete(self, flight: _StepInFlight, outputs: EngineCoreOutputs, before: _Before) -> None:
        step = flight.step
        for kv_event in self._scheduler.kv_cache_manager.take_events():
            event = self._kv_event(kv_event, before.tables)
            event.phase = "update"
            step.events.append(event)
        for output in outputs.outputs:
            request_id, token_ids = output.request_id, output.new_token_ids
            reason = None if output.finish_reason is None else str(output.finish_reason)
            texts = "".join(self._token_texts(token_ids))
            step.sampled.append(SampledTokens(request_id, token_ids, texts, reason))
            if reason is not None:
                given_back = before.tables.get(request_id, [])
                num_output_tokens = before.num_output_tokens[request_id] + len(token_ids)
                step.events.append(
                    Event("finish", request_id, given_back, num_output_tokens, reason, "update")
                )
            if request_id in flight.stages and token_ids:
                step.sampling.append(self._sampling(request_id, flight, token_ids[0]))
        step.after = self._queues()
        step.num_free_after = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        step.spans = _nest(flight.spans)
        # Steps that failed never come here; they are forgotten with those before this one.
        self._in_flight = self._in_flight[self._in_flight.index(flight) + 1 :]
        self._last_tables = self._tables()
        self.steps.append(step)
        self._on_step(step)

    # ---- the scheduler's side --------------------------------------------------------------------

    def _queues(self) -> Queues:
        scheduler = self._scheduler
        return Queues(
            running=[_request_state(request) for request in scheduler.running],
            waiting=[_request_state(request) for request in scheduler.waiting],
        )

    def _tables(self) -> Tables:
        tables = self._scheduler.kv_cache_manager.req_to_blocks
        return {req_id: [block.block_id for block in blocks] for req_id, blocks in tables.items()}

    def _scheduled(self, output: SchedulerOutput) -> Scheduled:
        manager = self._scheduler.kv_cache_manager
        cached = output.scheduled_cached_reqs
        new = {data.req_id: data for data in output.scheduled_new_reqs}
        requests = []
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            block_ids = manager.get_block_ids(req_id)
            if req_id in new:
                kind, start = "new", new[req_id].num_computed_tokens
            else:
                kind = "resumed" if req_id in cached.resumed_req_ids else "running"
                start = cached.num_computed_tokens[cached.req_ids.index(req_id)]
            if kind == "running":
                num_cached_tokens = 0
                new_ids = list(cached.new_block_ids[cached.req_ids.index(req_id)] or [])
            else:
                num_cached_tokens = start
                new_ids = block_ids[start // manager.block_size :]
            requests.append(
                ScheduledRequest(
                    req_id, kind, num_tokens, start, num_cached_tokens, block_ids, new_ids
                )
            )
        # The last one preempted stands first in the waiting queue.
        waiting = [request.request_id for request in self._scheduler.waiting]
        return Scheduled(
            token_budget=self._scheduler.max_num_scheduled_tokens,
            total_num_scheduled_tokens=output.total_num_scheduled_tokens,
            requests=requests,
            preempted_req_ids=sorted(
                output.preempted_req_ids,
                key=lambda i: waiting.index(i) if i in waiting else -1,
                reverse=True,
            ),
            finished_req_ids=sorted(output.finished_req_ids),
        )

    def _ended_between_steps(self) -> list[Event]:
        """Requests that the front end has ended: a stop text appeared, or the client gave up."""
        return [
            Event("finish", req_id, block_ids, detail="ended by the front end")
            for req_id, block_ids in self._last_tables.items()
            if req_id not in self._scheduler.requests
        ]

    def _plan_events(
        self,
        scheduled: Scheduled,
        before: Queues,
        tables_before: Tables,
        kv_events: list[KVCacheEvent],
    ) -> list[Event]:
        """schedule(), told in order: who was preempted, then request by request."""
        requests = scheduled.requests
        tables = tables_before | {r.request_id: r.block_ids for r in requests}
        events: list[Event] = []
        # Of each request: what it evicted to have its blocks, and what it published.
        evicted: dict[str, list[Event]] = {}
        stored: dict[str, list[Event]] = {}
        for kv_event in kv_events:
            event = self._kv_event(kv_event, tables_before)
            ids = event.block_ids
            taker = next((r for r in requests if _overlap(ids, r.new_block_ids)), None)
            holder = next((r for r in requests if _overlap(ids, r.block_ids)), None)
            if event.kind == "evict" and taker is not None:
                event.request_id = taker.request_id
                evicted.setdefault(taker.request_id, []).append(event)
            elif event.kind == "store" and holder is not None and not self._is_radix():
                event.request_id = holder.request_id
                stored.setdefault(holder.request_id, []).append(event)
            else:  # published before planning began (radix), or given up by the preempted
                events.append(event)
        for req_id in scheduled.preempted_req_ids:
            victim = before.find(req_id)
            num_lost = 0 if victim is None else victim.num_computed_tokens
            events.append(Event("preempt", req_id, tables_before.get(req_id, []), num_lost))
        for request in requests:
            req_id, size = request.request_id, self._scheduler.kv_cache_manager.block_size
            hit = request.block_ids[: request.num_cached_tokens // size]
            if hit:
                others = sorted(i for i in tables if i != req_id and _overlap(hit, tables[i]))
                others = [i for i in others if i not in scheduled.preempted_req_ids]
                detail = f"shared with {', '.join(others)}" if others else "held by nobody"
                events.append(Event("hit", req_id, hit, request.num_cached_tokens, detail))
            events += evicted.get(req_id, [])
            if request.new_block_ids:
                events.append(
                    Event("allocate", req_id, request.new_block_ids, request.num_scheduled_tokens)
                )
            events += stored.get(req_id, [])
        return events

    def _kv_event(self, kv_event: KVCacheEvent, tables: Tables) -> Event:
        size = self._scheduler.kv_cache_manager.block_size
        if isinstance(kv_event, BlockStored):
            ids, hashes = kv_event.block_ids, kv_event.block_hashes
            holder = next((i for i, table in tables.items() if _overlap(ids, table)), None)
            detail = " ".join(h.hex()[:HASH_DIGITS] for h in hashes)
            return Event("store", holder, ids, len(ids) * size, detail)
        if isinstance(kv_event, BlockRemoved):
            ids = kv_event.block_ids
            detail = " ".join(h.hex()[:HASH_DIGITS] for h in kv_event.block_hashes)
            return Event("evict", None, ids, len(ids) * size, detail)
        return Event("clear")

    def _is_radix(self) -> bool:
        return isinstance(self._scheduler.kv_cache_manager, RadixKVCacheManager)

    # ---- the pool --------------------------------------------------------------------------------

    def _pool(self) -> PoolState:
        manager = self._scheduler.kv_cache_manager
        pool = manager.block_pool
        holders: dict[int, list[str]] = {}
        for req_id, block_ids in self._tables().items():
            for block_id in block_ids:
                holders.setdefault(block_id, []).append(req_id)
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        position = {block_id: i for i, block_id in enumerate(free)}
        tree = _tree_hashes(manager)
        states = [
            BlockState(
                block_id=block.block_id,
                ref_cnt=block.ref_cnt,
                held_by=holders.get(block.block_id, []),
                block_hash=_hex(tree.get(block.block_id, block.block_hash)),
                in_tree=block.block_id in tree,
                free_position=position.get(block.block_id),
                is_null=block.is_null,
            )
            for block in pool.blocks
            if pool.num_gpu_blocks <= MAX_BLOCKS_LISTED
            or block.ref_cnt > 0
            or block.block_hash is not None
            or block.is_null
            or position[block.block_id] < NUM_NEXT_LISTED
        ]
        return PoolState(
            num_blocks=pool.num_gpu_blocks,
            block_size=manager.block_size,
            num_free=len(free),
            num_held=len(holders),
            usage=manager.usage,
            blocks=states,
        )

    # ---- the runner's side -----------------------------------------------------------------------

    def _batch(self, runner: GPUModelRunner) -> PackedBatch:
        batch = runner.input_batch
        num_reqs = batch.num_reqs
        query_start_loc = runner.query_start_loc.np[: num_reqs + 1].tolist()
        num_tokens = query_start_loc[-1]
        # From the device: with async scheduling, tokens not known to the host are filled in there.
        input_ids = runner.input_ids.gpu[:num_tokens].tolist()
        return PackedBatch(
            req_ids=batch.req_ids.copy(),
            input_ids=input_ids,
            input_texts=self._token_texts(input_ids),
            positions=runner.positions.np[:num_tokens].tolist(),
            slot_mapping=batch.block_table.slot_mapping.gpu[:num_tokens].tolist(),
            query_start_loc=query_start_loc,
            seq_lens=runner.seq_lens.np[:num_reqs].tolist(),
            samples=(~runner.discard_request_mask[:num_reqs]).tolist(),
        )

    @torch.inference_mode()
    def _look_at_sampling(self, runner: GPUModelRunner, flight: _StepInFlight) -> None:
        """The stages of the watched rows. Before sample_tokens, which changes the outputs that
        penalties look at."""
        step, state = flight.step, runner.execute_model_state
        assert step.batch is not None and state is not None
        rows = [
            row
            for row, req_id in enumerate(step.batch.req_ids)
            if step.batch.samples[row] and self._is_watched(req_id)
        ]
        if not rows or not self._watch_step(step.step):
            return
        logits = runner.model.compute_logits(  # type: ignore[operator]
            state.hidden_states[state.logits_indices]
        )
        metadata = runner.input_batch.sampling_metadata
        for row in rows:
            stages = sampling_stages(runner.sampler, logits, metadata, row)
            flight.stages[step.batch.req_ids[row]] = stages

    def _is_watched(self, req_id: str) -> bool:
        return req_id in self._watch or req_id.partition("_")[2] in self._watch

    def _sampling(self, request_id: str, flight: _StepInFlight, token_id: int) -> SamplingTrace:
        stages = flight.stages[request_id]
        trace = trace_sampling(request_id, stages, self._token_text)
        trace.sampled_token_id = token_id
        if all(token.token_id != token_id for token in trace.tokens):
            trace.tokens.append(token_prob(stages, token_id, self._token_text))
        return trace

    def _token_text(self, token_id: int) -> str:
        if self._decode is None:
            return ""
        if token_id not in self._texts:
            self._texts[token_id] = self._decode(token_id)
        return self._texts[token_id]

    def _token_texts(self, token_ids: list[int]) -> list[str]:
        return [] if self._decode is None else [self._token_text(i) for i in token_ids]


def _request_state(request: Request) -> RequestState:
    return RequestState(
        request_id=request.request_id,
        status=str(request.status),
        num_computed_tokens=request.num_computed_tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_output_placeholders=request.num_output_placeholders,
        num_preemptions=request.num_preemptions,
    )


def _tree_hashes(manager: KVCacheManager | RadixKVCacheManager) -> dict[int, bytes]:
    """The radix tree's blocks, with what vLLM would call them; empty without a tree."""
    if not isinstance(manager, RadixKVCacheManager):
        return {}
    cache = manager.radix_cache
    hashes: dict[int, bytes] = {}
    stack = [cache.root_node]
    while stack:
        node = stack.pop()
        page_ids = cache.page_ids(node)
        if page_ids:
            hashes.update(zip(page_ids, cache.page_hashes(node)[-len(page_ids) :], strict=True))
        stack.extend(node.children.values())
    return hashes


def _nest(parts: list[Span]) -> list[Span]:
    """Put the parts of a step under "step", or, where another step came between its sampling and
    its update, under "plan" and "update step"."""
    in_one_go = parts[-1].start_tick == parts[-2].end_tick + 1
    groups = {"step": parts} if in_one_go else {"plan": parts[:-1], "update step": parts[-1:]}
    return [
        Span(
            name,
            group[0].start,
            group[-1].end,
            group[0].start_tick,
            group[-1].end_tick,
            children=group,
        )
        for name, group in groups.items()
    ]


def _hex(block_hash: bytes | None) -> str | None:
    return None if block_hash is None else block_hash.hex()[:HASH_DIGITS]


def _overlap(a: list[int], b: list[int]) -> bool:
    return not set(a).isdisjoint(b)
