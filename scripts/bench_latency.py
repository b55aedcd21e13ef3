"""What one user waits for: time to the first token, and time a token, of single requests; and what
a shared prefix saves many.

    python scripts/bench_latency.py --model CHECKPOINT --engine nanovllm --workload decode

decode    one request, 128 tokens in, 256 out: milliseconds a token after the first
prefill   one prompt of 8,192 tokens, prefix caching off: milliseconds to its first token
prefix    64 requests with a common prefix of 4,096 tokens, which is in the cache, and 32 of their
          own, 16 tokens out: milliseconds for all of them

The floor of a decoded token is the time to read every weight once; of a prompt, the time of its
multiplications at the measured matrix rate; of the requests with a prefix, the time of their 16
steps if each reads the prefix once. One JSON line a workload.
"""

from __future__ import annotations

import argparse
import random
import time

from bench_common import (
    Ceilings,
    Engine,
    Floors,
    add_common_args,
    emit,
    make_engine,
    random_tokens,
    timed,
)

WARM_UP = 2  # rounds that do not count: kernels are compiled in them


def decode(engine: Engine, repeat: int) -> list[float]:
    rng, times = random.Random(1), []
    for _ in range(repeat + WARM_UP):
        # The time of the prompt and the first token is measured alone and taken off.
        first = timed(engine, [random_tokens(rng, 128)], [1])
        whole = timed(engine, [random_tokens(rng, 128)], [256])
        times.append((whole - first) / 255 * 1e3)
    return times


def prefill(engine: Engine, repeat: int) -> list[float]:
    rng = random.Random(2)
    return [timed(engine, [random_tokens(rng, 8192)], [1]) * 1e3 for _ in range(repeat + WARM_UP)]


def prefix(engine: Engine, repeat: int) -> list[float]:
    rng, times = random.Random(3), []
    for _ in range(repeat + WARM_UP):
        common = random_tokens(rng, 4096)
        timed(engine, [common + random_tokens(rng, 32)], [1])  # brings it into the cache
        prompts = [common + random_tokens(rng, 32) for _ in range(64)]
        times.append(timed(engine, prompts, [16] * 64) * 1e3)
    return times


WORKLOADS = {"decode": decode, "prefill": prefill, "prefix": prefix}


def floor_ms(workload: str, floors: Floors) -> float:
    if workload == "decode":
        return floors.decode_ms(128 + 128)
    if workload == "prefill":
        return floors.prefill_ms(8192)
    return 16 * floors.decode_ms(4096 + 64 * (32 + 8))


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_args(parser)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, default=None)
    args = parser.parse_args()
    workloads = args.workload or list(WORKLOADS)
    if "prefill" in workloads and len(workloads) > 1:
        parser.error("prefill runs without prefix caching, so in a process of its own")
    engine = make_engine(args, max_model_len=16384, enable_prefix_caching=workloads != ["prefill"])
    startup = time.perf_counter() - start
    times = {name: WORKLOADS[name](engine, args.repeat)[WARM_UP:] for name in workloads}
    floors = Floors(args.model, Ceilings.measure())
    emit(args, "startup", "s", [startup])
    for name in workloads:
        emit(args, name, "ms", times[name], floor_ms(name, floors))


if __name__ == "__main__":
    main()
