"""A scheduler alone, with tokens from a script instead of a model.

First under FCFS: two requests and a latecomer with the same beginning, in too few blocks. Then with
priorities: a request planned in a step is preempted in that same step.
"""

from __future__ import annotations

from scripted import make_request, make_scheduler, serve, serve_low_and_high

TOKEN_BUDGET = 8
NUM_BLOCKS = 9  # block 0 is the null block
REQUESTS = {  # id: prompt, max_tokens
    "a": ([1, 2, 3, 4, 5, 6], 7),
    "b": ([21, 22, 23, 24, 25, 26, 27, 28, 29, 30], 8),
    "c": ([1, 2, 3, 4, 15, 16, 17], 6),  # begins with a's first block
    "d": ([41, 42], 1),
}


def first_come_first_served() -> None:
    scheduler = make_scheduler(NUM_BLOCKS, block_size=4, max_num_batched_tokens=TOKEN_BUDGET)
    a, b, c, d = (
        make_request(req_id, prompt, max_tokens, block_size=4)
        for req_id, (prompt, max_tokens) in REQUESTS.items()
    )
    serve(scheduler, {1: [a, b], 3: [c], 7: [d]})


def main() -> None:
    print("first come, first served")
    first_come_first_served()
    print("by priority")
    serve_low_and_high()


if __name__ == "__main__":
    main()
