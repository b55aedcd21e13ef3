"""A scheduler alone, and requests that begin alike: what each of them finds in the prefix cache.

In the end, with priorities: blocks that were published and are never computed.
"""

from __future__ import annotations

from scripted import TOKEN, make_request, make_scheduler, serve

BLOCK_SIZE = 4
NUM_BLOCKS = 9  # block 0 is the null block
SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]  # two blocks
CONVERSATION = [*SYSTEM, 9, 10, TOKEN, TOKEN, TOKEN, 11]  # a, its answer, and one token more
REQUESTS = {  # id: prompt, max_tokens, cache_salt
    "a": ([*SYSTEM, 9, 10], 3, None),
    "b": ([*SYSTEM, 20], 2, None),
    "c": (CONVERSATION, 1, None),
    "d": (SYSTEM, 1, None),
    "e": ([*SYSTEM, 9], 1, "tenant"),
    "f": ([50, 51, 52, 53, 54, 55], 1, None),
    "g": (CONVERSATION, 1, None),
}


def requests_that_begin_alike() -> None:
    scheduler = make_scheduler(NUM_BLOCKS, BLOCK_SIZE, max_num_batched_tokens=32)
    a, b, *others = (
        make_request(req_id, prompt, max_tokens, BLOCK_SIZE, cache_salt=cache_salt)
        for req_id, (prompt, max_tokens, cache_salt) in REQUESTS.items()
    )
    serve(scheduler, {1: [a, b], **{4 + i: [other] for i, other in enumerate(others)}})


def blocks_that_are_never_computed() -> None:
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


def main() -> None:
    print("requests that begin alike")
    requests_that_begin_alike()
    print("blocks that are never computed")
    blocks_that_are_never_computed()


if __name__ == "__main__":
    main()
