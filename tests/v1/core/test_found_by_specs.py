"""Programs that the specifications in tests/spec found to go wrong, kept as plain tests."""

from __future__ import annotations

from typing import Any

from nanovllm.v1.core.kv_cache_utils import get_request_block_hasher
from nanovllm.v1.core.sched.scheduler import Scheduler
from nanovllm.v1.request import Request
from tests.spec.support import PagedModel, make_request
from tests.spec.test_scheduler import make_scheduler


def run(
    scheduler: Scheduler, arrivals: dict[int, Request], num_steps: int
) -> tuple[list[dict[str, int]], list[str], dict[str, Any]]:
    """Run some steps. Returns the tokens scheduled in each, misreads, finish reasons."""
    model = PagedModel(scheduler.kv_cache_manager.block_size)
    scheduled, reasons = [], {}
    for step in range(num_steps):
        if step in arrivals:
            scheduler.add_request(arrivals[step])
        output = scheduler.schedule()
        scheduled.append(output.num_scheduled_tokens)
        outputs = scheduler.update_from_output(output, model.execute(output))  # type: ignore[arg-type]
        reasons |= {o.request_id: str(o.finish_reason) for o in outputs.outputs if o.finished}
    return scheduled, model.misreads, reasons


def test_a_request_without_room_for_min_tokens_ends_at_the_models_length() -> None:
    """It once had neither a token to compute nor a reason to end, and the engine ran idle for ever.

    vLLM 0.23.0 does the same: check_stop looks at min_tokens before the model's length.
    """
    scheduler = make_scheduler(
        "hash", block_size=2, num_blocks=7, max_num_seqs=2, budget=8, max_model_len=6
    )
    request = make_request(
        "a", [1, 2, 3, 4], get_request_block_hasher(2), max_tokens=8, min_tokens=4
    )
    _, _, reasons = run(scheduler, {0: request}, num_steps=4)
    assert reasons == {"a": "length"}
    assert request.num_tokens == 6


def test_blocks_of_a_step_that_its_request_loses_again_are_not_found() -> None:
    """With priorities, a request planned earlier in a step may be preempted later in that step.

    Its blocks of that step were published and will not be computed. vLLM 0.23.0 leaves them
    findable: here the low-priority request would hit its own third chunk, of which it never
    computed a token.
    """
    scheduler = make_scheduler(
        "hash", block_size=2, num_blocks=8, max_num_seqs=2, budget=16, max_model_len=14,
        threshold=4, policy="priority", reserve=False,
    )  # fmt: skip
    hasher = get_request_block_hasher(2)
    low = make_request("low", [1, 2, 3, 4] * 3, hasher, priority=2, max_tokens=2)
    high = make_request("high", [4, 4], hasher, priority=0, max_tokens=2)
    scheduled, misreads, _ = run(scheduler, {0: low, 1: high}, num_steps=6)
    assert scheduled[:4] == [{"low": 4}, {"low": 4, "high": 2}, {"high": 1}, {"low": 4}]
    assert misreads == []
