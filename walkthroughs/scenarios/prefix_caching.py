"""A scheduler alone, and requests that begin alike: what each of them finds in the prefix cache.

In the end, with priorities: blocks that were published and are never computed.
"""

from __future__ import annotations

from scripted import TOKEN, make_request, make_scheduler, serve, serve_low_and_high

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


def main() -> None:
    print("requests that begin alike")
    requests_that_begin_alike()
    print("blocks that are never computed")
    serve_low_and_high()


if __name__ == "__main__":
    main()
