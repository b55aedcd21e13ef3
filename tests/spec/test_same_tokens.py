"""What a client may rely on: the tokens depend on the request, and on nothing else."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nanovllm.v1.core.kv_cache_utils import cdiv, get_request_block_hasher
from nanovllm.v1.core.sched.scheduler import Scheduler
from tests.spec.support import PROMPTS, SALTS, PagedModel, ci_examples, make_request
from tests.spec.test_scheduler import BACKENDS, make_scheduler

MAX_MODEL_LEN = 16

REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": PROMPTS,
            "max_tokens": st.integers(1, 8),
            "salt": SALTS,
            "priority": st.integers(0, 2),
            "eos_token_id": st.sampled_from([None, 0]),
        }
    ),
    min_size=1,
    max_size=6,
)
SETTINGS = st.fixed_dictionaries(
    {
        "backend": BACKENDS,
        "block_size": st.integers(1, 5),
        "extra_blocks": st.integers(0, 20),
        "max_num_seqs": st.integers(1, 6),
        "budget": st.integers(1, 40),
        "threshold": st.sampled_from([0, 3]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "async_scheduling": st.booleans(),
        "reserve": st.booleans(),
    }
)


def serve(
    requests: list[dict[str, Any]], arrivals: list[tuple[int, int]], settings: dict[str, Any]
) -> tuple[dict[int, list[int]], Scheduler]:
    """Serve `requests`, number i of them arriving at step `arrivals[i][0]`.

    Returns:
        The tokens of each request by its number, and the scheduler afterwards.
    """
    settings = dict(settings)
    block_size, backend = settings["block_size"], settings["backend"]
    settings["num_blocks"] = 1 + cdiv(MAX_MODEL_LEN, block_size) + settings.pop("extra_blocks")
    scheduler = make_scheduler(max_model_len=MAX_MODEL_LEN, **settings)
    hasher = None if backend == "none" else get_request_block_hasher(block_size)
    model = PagedModel(block_size)
    to_come = deque(sorted((step, tie, i) for i, (step, tie) in enumerate(arrivals)))
    tokens: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    in_flight: deque[Any] = deque()
    for step in range(1000):
        while to_come and to_come[0][0] <= step:
            i = to_come.popleft()[2]
            request = make_request(
                str(i), block_hasher=hasher, arrival_time=float(step), **requests[i]
            )
            scheduler.add_request(request)
        if not (to_come or scheduler.has_unfinished_requests()):
            return tokens, scheduler
        output = scheduler.schedule()
        in_flight.append((output, model.execute(output)))
        if len(in_flight) > settings["async_scheduling"]:
            for result in scheduler.update_from_output(*in_flight.popleft()).outputs:
                tokens[int(result.request_id)] += result.new_token_ids
    raise AssertionError("requests that never end")


@ci_examples(150)
@given(st.data())
def test_the_same_requests_give_the_same_tokens_however_they_are_served(data: Any) -> None:
    """Block size, blocks, budget, seats, cache, policy, async, order of arrival: none matters."""
    requests = data.draw(REQUESTS, label="requests")
    moments = st.tuples(st.integers(0, 12), st.integers(0, 5))
    arrivals = st.lists(moments, min_size=len(requests), max_size=len(requests))
    first, second = (
        serve(requests, data.draw(arrivals), data.draw(SETTINGS, label="settings"))[0]
        for _ in range(2)
    )
    assert first == second


@ci_examples(60)
@given(request=REQUESTS.map(lambda requests: requests[0]), settings=SETTINGS)
def test_a_repeated_request_repeats_its_tokens_out_of_the_cache(
    request: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Asked again after it has ended, it hits what it left behind and gets the same tokens."""
    tokens, _ = serve([request, request], [(0, 0), (200, 0)], settings)
    assert tokens[0] == tokens[1]
