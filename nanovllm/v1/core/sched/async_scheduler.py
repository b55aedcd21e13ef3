"""Scheduling one step ahead: step n + 1 is planned before the tokens of step n are known.

A step that will sample a token leaves a placeholder behind: the request counts one token more than
it can name (`num_output_placeholders`). The next step gives that token a slot and computes it; the
device has its value by then, the scheduler need not. What the scheduler learns late is only that a
request had already ended, and then the step computed one token too many for it, which is dropped.

Upstream: vllm/v1/core/sched/async_scheduler.py (0.23.0)
Left out: placeholders for speculative tokens, the pipeline-parallel cadence.
"""

from __future__ import annotations

from nanovllm.v1.core.sched.output import SchedulerOutput
from nanovllm.v1.core.sched.scheduler import Scheduler
from nanovllm.v1.request import Request, RequestStatus


class AsyncScheduler(Scheduler):
    """A Scheduler whose schedule() may run one step ahead of update_from_output()."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[req_id]
            if not request.is_prefill_chunk:
                request.num_output_placeholders += 1

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int]
    ) -> tuple[list[int], bool]:
        status_before_update = request.status
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids)
        request.num_output_placeholders -= len(new_token_ids)
        assert request.num_output_placeholders >= 0
        # A block is published once all its tokens are computed and known. The plan after this one
        # will publish what has become known just now, if the request is in it; this is for those
        # that a plan passes over. A request preempted meanwhile has no blocks to publish.
        if status_before_update is RequestStatus.RUNNING:
            self.kv_cache_manager.cache_blocks(
                request, request.num_computed_tokens - request.num_output_placeholders
            )
        return new_token_ids, stopped
