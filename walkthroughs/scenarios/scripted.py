"""What scenarios of the scheduler alone share: requests, and tokens from a script. No torch."""

from __future__ import annotations

from typing import Any

from nanovllm.config import CacheConfig, SchedulerConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.core.kv_cache_utils import get_request_block_hasher
from nanovllm.v1.core.sched.output import SchedulerOutput
from nanovllm.v1.core.sched.scheduler import Scheduler
from nanovllm.v1.request import Request

TOKEN = 7  # all that this model ever says


class ScriptedOutput:
    """As much of a ModelRunnerOutput as the scheduler looks at."""

    logprobs = None

    def __init__(self, req_ids: list[str], sampled_token_ids: list[list[int]]) -> None:
        self.req_id_to_index = {req_id: row for row, req_id in enumerate(req_ids)}
        self.sampled_token_ids = sampled_token_ids
        self.prompt_logprobs_dict: dict[str, Any] = {}


def execute_model(scheduler: Scheduler, output: SchedulerOutput) -> ScriptedOutput:
    """Every request whose known tokens are all computed gets TOKEN; a prompt chunk gets none."""
    req_ids = list(output.num_scheduled_tokens)
    is_chunk = [scheduler.requests[req_id].is_prefill_chunk for req_id in req_ids]
    return ScriptedOutput(req_ids, [[] if chunk else [TOKEN] for chunk in is_chunk])


def make_request(
    req_id: str,
    prompt: list[int],
    max_tokens: int,
    block_size: int,
    priority: int = 0,
    cache_salt: str | None = None,
) -> Request:
    return Request(
        request_id=req_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        arrival_time=0.0,
        cache_salt=cache_salt,
        priority=priority,
        block_hasher=get_request_block_hasher(block_size),
    )


def make_scheduler(num_blocks: int, block_size: int, **settings: Any) -> Scheduler:
    """`num_blocks` counts the null block."""
    scheduler_config = SchedulerConfig(max_num_seqs=3, max_model_len=32, **settings)
    cache_config = CacheConfig(block_size=block_size, num_gpu_blocks=num_blocks)
    return Scheduler(scheduler_config, cache_config)


def serve(scheduler: Scheduler, arrivals: dict[int, list[Request]]) -> None:
    """Run until everybody has finished; `arrivals`: who comes before which step (from 1)."""
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    step = 0
    while scheduler.has_unfinished_requests() or step < max(arrivals):
        step += 1
        for request in arrivals.get(step, []):
            scheduler.add_request(request)
        output = scheduler.schedule()
        print(
            f"step {step:2}  tokens {output.num_scheduled_tokens}"
            f"  running {[request.request_id for request in scheduler.running]}"
            f"  waiting {[request.request_id for request in scheduler.waiting]}"
            f"  preempted {sorted(output.preempted_req_ids)}"
            f"  free blocks {[block.block_id for block in queue.get_all_free_blocks()]}"
        )
        scheduler.update_from_output(output, execute_model(scheduler, output))  # type: ignore[arg-type]


def serve_low_and_high() -> None:
    """Priorities: `high` takes a block from `low`, which has been planned earlier in the step."""
    scheduler = make_scheduler(
        num_blocks=8,
        block_size=2,
        max_num_batched_tokens=16,
        long_prefill_token_threshold=4,
        policy="priority",
        scheduler_reserve_full_isl=False,
    )
    low = make_request("low", [1, 2, 3, 4] * 3, max_tokens=2, block_size=2, priority=2)
    high = make_request("high", [4, 4], max_tokens=2, block_size=2, priority=0)
    serve(scheduler, {1: [low], 2: [high]})
