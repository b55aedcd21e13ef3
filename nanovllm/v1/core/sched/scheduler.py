"""Who runs in the next step, for how many tokens, in which blocks.

Each request has `num_computed_tokens` and catches up with its tokens; prompts, prompt chunks and
decodes differ only in how far behind they are. A step has a token budget
(`max_num_batched_tokens`). Running requests draw on it first, in order; what is left admits waiting
ones. When a running request finds no free block, the one admitted last (or of lowest priority) is
preempted: its blocks are freed and it computes everything again later, often out of the prefix
cache.

Upstream: vllm/v1/core/sched/scheduler.py (0.23.0)
Left out: encoder inputs, LoRA, structured output, speculative tokens, KV connectors, pipeline
parallelism, pausing, streaming input, and with them the queue of skipped waiting requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanovllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from nanovllm.v1.core.radix_cache import RadixKVCacheManager
from nanovllm.v1.core.sched.interface import SchedulerInterface
from nanovllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from nanovllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from nanovllm.v1.core.sched.utils import check_stop
from nanovllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from nanovllm.v1.metrics.stats import SchedulerStats
from nanovllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from nanovllm.config import CacheConfig, SchedulerConfig
    from nanovllm.v1.outputs import ModelRunnerOutput


@dataclass
class _StepPlan:
    """One step while it is being planned."""

    token_budget: int
    timestamp: float
    new_reqs: list[Request] = field(default_factory=list)
    resumed_reqs: list[Request] = field(default_factory=list)
    running_reqs: list[Request] = field(default_factory=list)
    preempted_reqs: list[Request] = field(default_factory=list)
    req_to_new_blocks: dict[str, KVCacheBlocks] = field(default_factory=dict)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)

    def add(self, request: Request, num_new_tokens: int, new_blocks: KVCacheBlocks) -> None:
        self.req_to_new_blocks[request.request_id] = new_blocks
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.token_budget -= num_new_tokens

    def remove_running(self, request: Request) -> bool:
        """Undo `add` for a request that is preempted after all. True if it had been planned."""
        if request.request_id not in self.num_scheduled_tokens:
            return False
        self.running_reqs.remove(request)
        self.req_to_new_blocks.pop(request.request_id)
        self.token_budget += self.num_scheduled_tokens.pop(request.request_id)
        return True


class Scheduler(SchedulerInterface):
    """Plans steps and takes in their results.

        add_request                 schedule: budget and free blocks suffice
        -----------> waiting ------------------------------------------------> running
                        ^                                                       |   |
                        |     schedule: no block left (preempted, to the front) |   |
                        +-------------------------------------------------------+   |
                                                     update_from_output: stopped    |
        finish_requests: from either of them -------------------------------> finished

    `requests` holds exactly the requests in `waiting` and `running`. At most `max_num_seqs` run.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        log_stats: bool = False,
    ) -> None:
        """
        Args:
            cache_config: its `num_gpu_blocks` must be set.
            log_stats: record events and hit rates.
        """
        assert cache_config.num_gpu_blocks is not None
        self.scheduler_config = scheduler_config
        self.log_stats = log_stats
        self.max_num_running_reqs = scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens = scheduler_config.max_num_batched_tokens
        self.max_model_len = scheduler_config.max_model_len
        self.policy = SchedulingPolicy(scheduler_config.policy)
        manager_cls = (
            RadixKVCacheManager if cache_config.prefix_cache_backend == "radix" else KVCacheManager
        )
        self.kv_cache_manager = manager_cls(
            num_gpu_blocks=cache_config.num_gpu_blocks,
            block_size=cache_config.block_size,
            max_model_len=self.max_model_len,
            enable_caching=cache_config.enable_prefix_caching,
            log_stats=log_stats,
        )
        self.requests: dict[str, Request] = {}
        self.waiting = create_request_queue(self.policy)
        self.running: list[Request] = []
        # Ended since the last schedule(); the next one tells the runner.
        self.finished_req_ids: set[str] = set()
        self.prev_step_scheduled_req_ids: set[str] = set()

    # ---- planning a step -------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        plan = _StepPlan(self.max_num_scheduled_tokens, time.monotonic())
        self.kv_cache_manager.new_step_starts()
        self._schedule_running(plan)
        # Once blocks ran out for those already running, nobody else is let in.
        if not plan.preempted_reqs:
            self._schedule_waiting(plan)

        assert plan.token_budget >= 0
        assert len(self.running) <= self.max_num_running_reqs
        scheduler_output = self._make_scheduler_output(plan)
        self._update_after_schedule(scheduler_output)
        return scheduler_output

    def _schedule_running(self, plan: _StepPlan) -> None:
        """Give every running request its next tokens, preempting others for blocks if need be."""
        req_index = 0
        while req_index < len(self.running) and plan.token_budget > 0:
            request = self.running[req_index]
            num_new_tokens = self._num_new_tokens(request, plan.token_budget)
            if num_new_tokens == 0:
                # Async scheduling: all it can compute is under way. Those behind it may still go
                # on.
                req_index += 1
                continue

            new_blocks = None
            while request.status is RequestStatus.RUNNING:
                new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
                if new_blocks is not None:
                    break
                victim = self._pick_victim()
                if plan.remove_running(victim):
                    req_index -= 1
                self._preempt_request(victim, plan.timestamp)
                plan.preempted_reqs.append(victim)
            if new_blocks is None:
                break  # The request itself was the last one left to preempt.

            plan.running_reqs.append(request)
            plan.add(request, num_new_tokens, new_blocks)
            req_index += 1

    def _num_new_tokens(self, request: Request, token_budget: int) -> int:
        """How many tokens a running request computes in this step; 0: none for now."""
        if (
            request.num_output_placeholders > 0
            # num_computed_tokens counts the placeholders but the last; with one more step the
            # request would pass max_tokens, whatever the pending tokens turn out to be.
            and request.num_computed_tokens + 2 - request.num_output_placeholders
            >= request.num_prompt_tokens + request.max_tokens
        ):
            return 0
        num_new_tokens = (
            len(request.all_token_ids)
            + request.num_output_placeholders
            - request.num_computed_tokens
        )
        threshold = self.scheduler_config.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        # A token at position max_model_len - 1 ends the request and is never an input.
        return min(
            num_new_tokens, token_budget, self.max_model_len - 1 - request.num_computed_tokens
        )

    def _pick_victim(self) -> Request:
        """Take out of `running` the request to preempt."""
        if self.policy is SchedulingPolicy.PRIORITY:
            victim = max(self.running, key=lambda request: (request.priority, request.arrival_time))
            self.running.remove(victim)
            return victim
        return self.running.pop()

    def _schedule_waiting(self, plan: _StepPlan) -> None:
        """Admit waiting requests, in the queue's order, until one does not fit."""
        while self.waiting and plan.token_budget > 0:
            if len(self.running) == self.max_num_running_reqs:
                break
            request = self.waiting.peek_request()
            # The hit comes first: what is left to compute, and so everything below, depends on it.
            new_computed_blocks, num_computed_tokens = self.kv_cache_manager.get_computed_blocks(
                request
            )
            # Resumed requests have output tokens to compute again, so num_tokens, not the prompt's
            # length.
            num_new_tokens = request.num_tokens - num_computed_tokens
            threshold = self.scheduler_config.long_prefill_token_threshold
            if 0 < threshold < num_new_tokens:
                num_new_tokens = threshold
            if num_new_tokens > plan.token_budget:
                if not self.scheduler_config.enable_chunked_prefill:
                    break
                num_new_tokens = plan.token_budget

            new_blocks = self.kv_cache_manager.allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens=num_computed_tokens,
                new_computed_blocks=new_computed_blocks,
                full_sequence_must_fit=self.scheduler_config.scheduler_reserve_full_isl,
            )
            if new_blocks is None:
                break  # The head waits for blocks, and nobody overtakes it.
            self._admit(request, num_new_tokens, num_computed_tokens, plan)

    def _admit(
        self, request: Request, num_new_tokens: int, num_computed_tokens: int, plan: _StepPlan
    ) -> None:
        """Move the head of the waiting queue to `running`."""
        self.waiting.pop_request()
        self.running.append(request)
        if request.status is RequestStatus.PREEMPTED:
            plan.resumed_reqs.append(request)
        else:
            plan.new_reqs.append(request)
        if request.prefill_stats is not None:  # it has given no output yet
            request.prefill_stats.set(request.num_prompt_tokens, num_computed_tokens)
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, plan.timestamp)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        # The runner has no table for it (any more): send the whole one, hits included.
        whole_table = self.kv_cache_manager.get_blocks(request.request_id)
        plan.add(request, num_new_tokens, whole_table)

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        """Send a request, already out of `running`, back to wait, without its blocks."""
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, timestamp)
        self.waiting.prepend_request(request)

    def _make_scheduler_output(self, plan: _StepPlan) -> SchedulerOutput:
        new_reqs_data = [
            NewRequestData.from_request(
                request, plan.req_to_new_blocks[request.request_id].get_block_ids()
            )
            for request in plan.new_reqs
        ]
        cached_reqs_data = self._make_cached_request_data(plan)
        self.prev_step_scheduled_req_ids = set(plan.num_scheduled_tokens)
        return SchedulerOutput(
            scheduled_new_reqs=new_reqs_data,
            scheduled_cached_reqs=cached_reqs_data,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(plan.num_scheduled_tokens.values()),
            preempted_req_ids={request.request_id for request in plan.preempted_reqs},
            finished_req_ids=self.finished_req_ids,
        )

    def _make_cached_request_data(self, plan: _StepPlan) -> CachedRequestData:
        """Describe by their changes the requests that the runner has seen before."""
        data = CachedRequestData.make_empty()
        data.resumed_req_ids = {request.request_id for request in plan.resumed_reqs}
        for request in plan.running_reqs + plan.resumed_reqs:
            req_id = request.request_id
            new_blocks = plan.req_to_new_blocks[req_id]
            data.req_ids.append(req_id)
            data.new_block_ids.append(new_blocks.get_block_ids() if new_blocks.blocks else None)
            data.num_computed_tokens.append(request.num_computed_tokens)
            data.num_output_tokens.append(
                request.num_output_tokens + request.num_output_placeholders
            )
            if req_id not in self.prev_step_scheduled_req_ids:
                data.all_token_ids[req_id] = request.all_token_ids.copy()
        return data

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Count the step's tokens as computed, already now.

        The output above had to say where each request starts. From here on the step is as good as
        done, and the next one can be planned before this one has run. (The blocks it fills were
        published even before, by allocate_slots.)
        """
        for req_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            request.num_computed_tokens += num_scheduled
            request.is_prefill_chunk = (
                request.num_computed_tokens
                < len(request.all_token_ids) + request.num_output_placeholders
            )
        # A new set, not clear(): the output holds the old one.
        self.finished_req_ids = set()

    # ---- taking in its result --------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        outputs: list[EngineCoreOutput] = []
        stopped_running_reqs: set[Request] = set()
        stopped_preempted_reqs: set[Request] = set()
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(req_id)
            if request is None:
                continue  # Aborted while the step was under way.
            req_index = model_runner_output.req_id_to_index[req_id]
            new_token_ids = model_runner_output.sampled_token_ids[req_index]
            if not new_token_ids:
                continue  # A chunk: what was sampled after it has been dropped.

            status_before_stop = request.status
            new_token_ids, stopped = self._update_request_with_output(request, new_token_ids)
            if stopped:
                self._free_request(request)
                if status_before_stop is RequestStatus.RUNNING:
                    stopped_running_reqs.add(request)
                else:  # Async scheduling: preempted since the step was planned.
                    stopped_preempted_reqs.add(request)
            if new_token_ids or stopped:
                outputs.append(
                    self._make_output(request, req_index, new_token_ids, model_runner_output)
                )

        if stopped_running_reqs:
            self.running = [r for r in self.running if r not in stopped_running_reqs]
        if stopped_preempted_reqs:
            self.waiting.remove_requests(stopped_preempted_reqs)
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=self.make_stats())

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int]
    ) -> tuple[list[int], bool]:
        """Append sampled tokens until one of them ends the request.

        Returns:
            The tokens appended, and whether the request has ended.
        """
        for i, token_id in enumerate(new_token_ids, start=1):
            request.append_output_token_ids(token_id)
            if check_stop(request, self.max_model_len):
                return new_token_ids[:i], True
        return new_token_ids, False

    @staticmethod
    def _make_output(
        request: Request,
        req_index: int,
        new_token_ids: list[int],
        model_runner_output: ModelRunnerOutput,
    ) -> EngineCoreOutput:
        logprobs = model_runner_output.logprobs
        if logprobs is not None and request.sampling_params.logprobs is not None:
            logprobs = logprobs.slice_request(req_index, len(new_token_ids))
        else:
            logprobs = None
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            new_logprobs=logprobs,
            new_prompt_logprobs_tensors=model_runner_output.prompt_logprobs_dict.get(
                request.request_id
            ),
            finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
            events=request.take_events(),
            prefill_stats=request.take_prefill_stats(),
        )

    # ---- requests come and go --------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self.requests, f"duplicate id {request.request_id}"
        self.waiting.add_request(request)
        self.requests[request.request_id] = request
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        assert RequestStatus.is_finished(finished_status)
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        # dict.fromkeys: an id named twice ends once, in the order given.
        ended = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        if not ended:
            return []
        dropped = set(ended)
        self.running = [request for request in self.running if request not in dropped]
        self.waiting.remove_requests(dropped)
        for request in ended:
            request.status = finished_status
            self._free_request(request)
        return [request.request_id for request in ended]

    def _free_request(self, request: Request) -> None:
        """Forget an ended request. The caller takes it out of its queue."""
        assert request.is_finished()
        self.kv_cache_manager.free(request)
        self.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]

    def get_num_unfinished_requests(self) -> int:
        return len(self.waiting) + len(self.running)

    def has_finished_requests(self) -> bool:
        return bool(self.finished_req_ids)

    def reset_prefix_cache(self) -> bool:
        return self.kv_cache_manager.reset_prefix_cache()

    def make_stats(self) -> SchedulerStats | None:
        if not self.log_stats:
            return None
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_stats=self.kv_cache_manager.make_prefix_cache_stats(),
        )
