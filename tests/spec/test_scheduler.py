"""Scheduler and AsyncScheduler: who runs in a step, for how many tokens, in which blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import initialize, invariant, precondition, rule

from nanovllm.config import CacheConfig, SchedulerConfig
from nanovllm.v1.core.kv_cache_utils import KVCacheBlock, cdiv, get_request_block_hasher
from nanovllm.v1.core.radix_cache import RadixKVCacheManager
from nanovllm.v1.core.sched.async_scheduler import AsyncScheduler
from nanovllm.v1.core.sched.output import SchedulerOutput
from nanovllm.v1.core.sched.scheduler import Scheduler
from nanovllm.v1.engine import EngineCoreOutput
from nanovllm.v1.request import Request, RequestStatus
from tests.spec.blocks import BlockAccounting
from tests.spec.support import (
    PROMPTS,
    SALTS,
    PagedModel,
    ScriptedOutput,
    ci_examples,
    expected_output,
    make_request,
    one_of_its,
)

BACKENDS = st.sampled_from(["none", "hash", "radix"])


def make_scheduler(
    backend: str,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    max_model_len: int,
    threshold: int = 0,
    chunked: bool = True,
    policy: Any = "fcfs",
    async_scheduling: bool = False,
    reserve: bool = True,
) -> Scheduler:
    """A scheduler with the settings of one example, made to fit one another."""
    if not chunked:
        budget = max(budget, max_model_len)
    scheduler_config = SchedulerConfig(
        max_num_batched_tokens=max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=threshold,
        policy=policy,
        async_scheduling=async_scheduling,
        scheduler_reserve_full_isl=reserve,
    )
    cache_config = CacheConfig(
        block_size=block_size,
        enable_prefix_caching=backend != "none",
        prefix_cache_backend="radix" if backend == "radix" else "hash",
        num_gpu_blocks=num_blocks,
    )
    scheduler_cls = AsyncScheduler if async_scheduling else Scheduler
    return scheduler_cls(scheduler_config, cache_config, log_stats=True)


@dataclass
class Step:
    """One call of schedule(): what was there before, what it said, what it left."""

    output: SchedulerOutput
    running_before: list[Request]
    waiting_before: list[Request]
    running: list[Request]
    waiting: list[Request]
    starts: dict[str, int]  # request -> its first token in this step
    stopped_at: dict[str, int]  # the same, as it should be; a request just admitted has none
    known_before: set[str]  # requests the runner knows and has not been told to forget
    ended_before: set[str]
    num_in_flight: int  # steps whose results had not come back

    @property
    def admitted(self) -> list[Request]:
        """In the order of scheduling."""
        waiting = {request.request_id: request for request in self.waiting_before}
        return [waiting[r] for r in self.output.num_scheduled_tokens if r in waiting]


def about_the_step(check: Callable[[Any, Step], None]) -> Callable[[Any], None]:
    """An invariant about the step just scheduled, if one was."""

    @wraps(check)
    def check_if_scheduled(self: Any) -> None:
        if self.step is not None:
            check(self, self.step)

    return invariant()(check_if_scheduled)


class Scheduling(BlockAccounting):
    """A scheduler, and a model that computes each token from what it really reads (PagedModel).

    Of every request we keep what the scheduler was told (`living`), the tokens it must generate
    (`expected`) and has generated (`received`), and how many of its tokens have been given to
    compute since it was last admitted (`given`).
    """

    # ---- the settings of one example -------------------------------------------------------------

    @initialize(
        backend=BACKENDS,
        block_size=st.integers(1, 4),
        max_model_len=st.integers(6, 18),
        extra_blocks=st.integers(0, 5),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 14),
        threshold=st.sampled_from([0, 0, 2, 5]),
        chunked=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        async_scheduling=st.booleans(),
        reserve=st.booleans(),
    )
    def an_engine_starts(
        self, block_size: int, max_model_len: int, extra_blocks: int, **settings: Any
    ) -> None:
        """Its blocks suffice for one request of full length: on less it refuses to start."""
        num_blocks = 1 + cdiv(max_model_len, block_size) + extra_blocks
        self.scheduler = make_scheduler(
            block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len, **settings
        )
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.is_async = settings["async_scheduling"]
        self.hasher = (
            get_request_block_hasher(block_size) if settings["backend"] != "none" else None
        )
        self.model = PagedModel(block_size)
        self.in_flight: deque[tuple[SchedulerOutput, ScriptedOutput]] = deque()
        self.living: dict[str, Request] = {}
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.received: dict[str, list[int]] = {}
        self.given: dict[str, int] = {}
        self.hits: dict[str, int] = {}  # at the latest admission
        self.ended: set[str] = set()  # since the runner was last told
        self.step: Step | None = None
        self.num_requests = 0
        self.num_preemptions = 0

    def tables(self) -> list[Sequence[KVCacheBlock]]:
        return list(self.manager.req_to_blocks.values())

    def blocks_of_the_tree(self) -> list[int]:
        if not isinstance(self.manager, RadixKVCacheManager):
            return []
        blocks, stack = [], [self.manager.radix_cache.root_node]
        while stack:
            node = stack.pop()
            blocks += [slot // self.block_size for slot in node.value[:: self.block_size]]
            stack.extend(node.children.values())
        return blocks

    def rank(self, request: Request) -> tuple[int, float]:
        """Lower goes first: the order of arrival, under PRIORITY within equal priorities."""
        by_priority = self.scheduler.policy.value == "priority"
        return (request.priority if by_priority else 0, request.arrival_time)

    @property
    def can_schedule(self) -> bool:
        """Sync: one step at a time. Async: one step may be planned before the last is known."""
        return len(self.in_flight) < (2 if self.is_async else 1)

    # ---- requests come and go --------------------------------------------------------------------

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 10),
        salt=SALTS,
        priority=st.integers(0, 2),
        eos=st.sampled_from([None, None, 0]),
        min_tokens=st.sampled_from([0, 0, 1, 4]),
        stop=st.sampled_from([None, None, None, [4]]),
    )
    def a_request_arrives(
        self,
        prompt: list[int],
        max_tokens: int,
        salt: str | None,
        priority: int,
        eos: int | None,
        min_tokens: int,
        stop: list[int] | None,
    ) -> None:
        """It waits; prompts that leave no room for an answer are refused before they get here."""
        req_id = f"r{self.num_requests}"
        request = make_request(
            req_id,
            prompt[: self.max_model_len - 1],
            self.hasher,
            salt,
            max_tokens,
            priority,
            float(self.num_requests),
            eos,
            stop,
            min(min_tokens, max_tokens),
        )
        self.num_requests += 1
        self.scheduler.add_request(request)
        self.living[req_id] = request
        self.expected[req_id] = expected_output(request, self.max_model_len)
        self.received[req_id] = []

    @precondition(lambda self: self.living)
    @rule(req_id=one_of_its("living"))
    def a_client_gives_up(self, req_id: str) -> None:
        """An abort ends a request wherever it stands, and gives its blocks back at once."""
        ended = self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        assert ended == [req_id]
        self._forget(req_id)

    def _forget(self, req_id: str) -> None:
        del self.living[req_id]
        self.given.pop(req_id, None)
        self.ended.add(req_id)

    # ---- a step ----------------------------------------------------------------------------------

    @precondition(lambda self: self.can_schedule)
    @rule()
    def a_step_is_scheduled(self) -> None:
        """The scheduler plans a step, and the model computes it."""
        scheduler = self.scheduler
        running_before, waiting_before = list(scheduler.running), list(scheduler.waiting)
        known_before = set(self.model.tables) - self.ended
        output = scheduler.schedule()
        starts = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for req_id in output.preempted_req_ids:
            self.given.pop(req_id, None)
            self.num_preemptions += 1
        self.step = Step(
            output=output,
            running_before=running_before,
            waiting_before=waiting_before,
            running=list(scheduler.running),
            waiting=list(scheduler.waiting),
            starts=starts,
            stopped_at={req_id: self.given[req_id] for req_id in starts if req_id in self.given},
            known_before=known_before,
            ended_before=self.ended,
            num_in_flight=len(self.in_flight),
        )
        self.ended = set()
        for req_id, start in starts.items():
            if req_id not in self.given:
                self.hits[req_id] = start
            self.given[req_id] = start + output.num_scheduled_tokens[req_id]
        self.in_flight.append((output, self.model.execute(output)))

    def check_invariants(self, *args: Any) -> None:
        super().check_invariants(*args)
        self.step = None

    @invariant()
    def every_row_reads_exactly_its_own_context(self) -> None:
        """Cached, shared, resumed or chunked: the model reads the keys and values of just these
        tokens, once the whole batch's have been written."""
        assert self.model.misreads == []

    @about_the_step
    def a_step_stays_within_its_budget(self, step: Step) -> None:
        """At most max_num_batched_tokens in all, and of one request the long-prefill threshold."""
        scheduled = step.output.num_scheduled_tokens
        assert step.output.total_num_scheduled_tokens == sum(scheduled.values())
        config = self.scheduler.scheduler_config
        assert sum(scheduled.values()) <= config.max_num_batched_tokens
        threshold = config.long_prefill_token_threshold
        assert not threshold or all(n <= threshold for n in scheduled.values())

    @about_the_step
    def who_is_scheduled_computes_at_least_one_token(self, step: Step) -> None:
        """There is no zero-length query, not even when a prompt is cached whole."""
        assert all(n >= 1 for n in step.output.num_scheduled_tokens.values())

    @about_the_step
    def a_hit_is_whole_blocks_short_of_the_last_token(self, step: Step) -> None:
        """Who is admitted starts behind full blocks, and computes at least its last token."""
        for req_id, start in step.starts.items():
            if req_id not in step.stopped_at:
                assert start % self.block_size == 0
                assert start < self.living[req_id].num_tokens
                assert start == 0 or self.hasher is not None, "a hit with caching off"

    @about_the_step
    def tokens_counted_are_tokens_computed(self, step: Step) -> None:
        """A running request goes on where it stopped: no token is computed twice or left out."""
        for req_id, start in step.starts.items():
            assert start == step.stopped_at.get(req_id, start)
            assert self.living[req_id].num_computed_tokens == self.given[req_id]

    @about_the_step
    def nobody_is_given_a_step_past_its_last_token(self, step: Step) -> None:
        """Async: with what is under way, a request never has more tokens than it may generate."""
        for req_id in step.output.num_scheduled_tokens:
            request = self.living[req_id]
            assert request.num_output_tokens + request.num_output_placeholders <= request.max_tokens

    @about_the_step
    def running_requests_go_first(self, step: Step) -> None:
        """They draw on the budget in their order, before anybody is let in."""
        order = list(step.output.num_scheduled_tokens)
        old = [r.request_id for r in step.running_before if r.request_id in order]
        assert order[: len(old)] == old

    @about_the_step
    def nobody_is_overtaken(self, step: Step) -> None:
        """The admitted come before the waiting in rank (arrival or priority), and in that order."""
        admitted = step.admitted
        assert admitted == sorted(admitted, key=self.rank)
        for request in step.waiting_before:
            if admitted and request not in admitted:
                assert self.rank(admitted[-1]) < self.rank(request)

    @about_the_step
    def the_last_in_rank_is_preempted(self, step: Step) -> None:
        """Who is preempted waits again, and ranks behind everybody who goes on running."""
        for req_id in step.output.preempted_req_ids:
            victim = self.living[req_id]
            assert victim in step.waiting
            assert all(self.rank(victim) > self.rank(request) for request in step.running)

    @about_the_step
    def nobody_is_let_in_when_blocks_ran_out_inside(self, step: Step) -> None:
        """A step that preempts admits nobody."""
        assert not (step.output.preempted_req_ids and step.admitted)

    @about_the_step
    def an_empty_step_has_a_reason(self, step: Step) -> None:
        """Nobody is there, an async result is pending, or somebody was just preempted."""
        if not step.output.num_scheduled_tokens:
            has_work = step.running or step.waiting
            assert not has_work or step.num_in_flight or step.output.preempted_req_ids

    @about_the_step
    def nobody_waits_in_vain(self, step: Step) -> None:
        """With budget left, who does not run lacks a seat, blocks or (async) a known token."""
        output, config = step.output, self.scheduler.scheduler_config
        budget = config.max_num_batched_tokens - output.total_num_scheduled_tokens
        if output.preempted_req_ids or not budget:
            return
        for request in step.running:
            if request.request_id not in output.num_scheduled_tokens:
                assert request.num_output_placeholders > 0, "skipped, with budget left"
        if step.waiting and len(step.running) < config.max_num_seqs:
            head = step.waiting[0]
            too_long = not config.enable_chunked_prefill and head.num_tokens > budget
            assert too_long or not self._surely_fits(head)

    @about_the_step
    def the_runner_is_told_who_is_who(self, step: Step) -> None:
        """New means never sent before, resumed means preempted before, and every end is told."""
        output = step.output
        new = {data.req_id for data in output.scheduled_new_reqs}
        cached = set(output.scheduled_cached_reqs.req_ids)
        assert new | cached == set(output.num_scheduled_tokens)
        assert not new & step.known_before
        assert cached <= step.known_before
        assert output.finished_req_ids == step.ended_before
        resumed = {r for r in cached if r not in step.stopped_at}
        assert output.scheduled_cached_reqs.resumed_req_ids == resumed

    def check_the_step(self) -> None:
        """Within a rule of several steps: what is otherwise checked between rules."""
        for check in self.invariants:
            check.function(self)
        self.step = None

    def _surely_fits(self, request: Request) -> bool:
        """Are there free blocks for all of its tokens, even if none of them is cached?"""
        available = self.pool.get_num_free_blocks()
        if isinstance(self.manager, RadixKVCacheManager):
            available += self.manager.radix_cache.evictable_size() // self.block_size
        return cdiv(request.num_tokens, self.block_size) <= available

    @precondition(lambda self: self.in_flight)
    @rule()
    def a_result_comes_back(self) -> None:
        """Tokens are taken in; who has got the last one ends there, for the right reason."""
        scheduler_output, result = self.in_flight.popleft()
        outputs = self.scheduler.update_from_output(scheduler_output, result)  # type: ignore[arg-type]
        for output in outputs.outputs:
            self._take(output)

    def _take(self, output: EngineCoreOutput) -> None:
        req_id = output.request_id
        assert req_id in self.living, "no output after the end"
        received = self.received[req_id]
        expected, reason = self.expected[req_id]
        received += output.new_token_ids
        assert received == expected[: len(received)], "exactly the tokens it would get alone"
        if output.prefill_stats is not None:
            hit = self.hits[req_id]
            num_prompt = self.living[req_id].num_prompt_tokens
            assert output.prefill_stats.num_cached_tokens == hit
            assert output.prefill_stats.num_computed_tokens == num_prompt - hit
        assert output.finished == (len(received) == len(expected)), "ends with its last token"
        if output.finished:
            assert str(output.finish_reason) == reason
            self._forget(req_id)

    @precondition(lambda self: len(self.living) >= 3)
    @rule()
    def everybody_is_served(self) -> None:
        """A finite stream drains: every request ends, after a bounded number of steps."""
        # Each step computes a token of somebody, and a preemption repeats at most a whole request.
        remaining = sum(self.max_model_len for _ in self.living)
        for _ in range(4 * remaining * (1 + len(self.living))):
            if not self.living and not self.in_flight:
                break
            if self.in_flight and not self.can_schedule:
                self.a_result_comes_back()
            elif self.living:
                self.a_step_is_scheduled()
                self.check_the_step()
            else:
                self.a_result_comes_back()
        assert not self.living, f"never served: {sorted(self.living)}"

    @rule()
    def the_prefix_cache_is_reset(self) -> None:
        """It is forgotten, unless a request holds blocks."""
        held = any(self.tables())
        assert self.scheduler.reset_prefix_cache() == (not held)

    # ---- what always holds -----------------------------------------------------------------------

    @invariant()
    def no_more_run_than_there_are_seats(self) -> None:
        """At most max_num_seqs requests run, and those that run are those that hold blocks."""
        running = {request.request_id for request in self.scheduler.running}
        assert len(self.scheduler.running) <= self.scheduler.scheduler_config.max_num_seqs
        assert {r for r, table in self.manager.req_to_blocks.items() if table} == running

    @invariant()
    def every_living_request_is_in_one_queue(self) -> None:
        """Requests are conserved: each that has not ended waits or runs, and nobody else does."""
        queues = [*self.scheduler.running, *self.scheduler.waiting]
        assert sorted(r.request_id for r in queues) == sorted(self.living)
        assert self.scheduler.requests == self.living
        assert self.scheduler.get_num_unfinished_requests() == len(self.living)

    @invariant()
    def under_fcfs_everybody_stays_in_order_of_arrival(self) -> None:
        """First come, first served: those running, then those waiting, stand as they arrived."""
        if self.scheduler.policy.value == "fcfs":
            queues = [*self.scheduler.running, *self.scheduler.waiting]
            assert queues == sorted(queues, key=self.rank)

    @invariant()
    def the_waiting_stand_in_order_of_rank(self) -> None:
        """The head of the queue is the next in rank, a preempted request included."""
        waiting = list(self.scheduler.waiting)
        assert waiting == sorted(waiting, key=self.rank)
        if waiting:
            assert self.scheduler.waiting.peek_request() is waiting[0]

    @invariant()
    def nobody_passes_the_model_length(self) -> None:
        """No request has more tokens, or blocks for more, than max_model_len."""
        for request in self.living.values():
            assert request.num_tokens <= self.max_model_len
            table = self.manager.get_block_ids(request.request_id)
            assert len(table) <= cdiv(self.max_model_len, self.block_size)

    @invariant()
    def after_the_last_end_nothing_is_remembered(self) -> None:
        """With nobody left, blocks are free or evictable; no table, row or queue knows anybody."""
        if self.living:
            return
        assert not self.manager.req_to_blocks
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert set(self.model.tables) <= self.ended, "the runner was not told of every end"
        reclaimable = self.pool.get_num_free_blocks()
        if isinstance(self.manager, RadixKVCacheManager):
            cache = self.manager.radix_cache
            assert cache.protected_size() == 0
            reclaimable += cache.evictable_size() // self.block_size
        else:
            assert not self.manager.num_cached_block
        assert reclaimable == self.pool.num_gpu_blocks - 1

    def teardown(self) -> None:
        """Prefer programs that preempt."""
        if hasattr(self, "num_preemptions"):
            target(float(self.num_preemptions), label="preemptions")


TestScheduling = Scheduling.TestCase
TestScheduling.settings = ci_examples(150)
