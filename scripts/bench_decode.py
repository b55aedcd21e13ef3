"""The decode step at a large batch, where the KV cache is most of what is read.

    python scripts/bench_decode.py --model CHECKPOINT --engine nanovllm

256 requests of 1,024 tokens each: the time for 128 output tokens less the time for 16, divided by
the 112 steps between. Their mean context is what the floor is computed for: weights once, and every
request's keys and values once. One JSON line.
"""

from __future__ import annotations

import argparse
import random

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

SHORT = 16


def step_ms(engine: Engine, args: argparse.Namespace) -> list[float]:
    rng = random.Random(1)

    def run(num_tokens: int) -> float:
        prompts = [random_tokens(rng, args.prompt_len) for _ in range(args.batch_size)]
        return timed(engine, prompts, [num_tokens] * args.batch_size)

    run(SHORT)
    times = []
    for _ in range(args.repeat):
        short, long = run(SHORT), run(args.output_len)
        times.append((long - short) / (args.output_len - SHORT) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_args(parser)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    args = parser.parse_args()
    engine = make_engine(args, max_model_len=4096)
    times = step_ms(engine, args)
    floors = Floors(args.model, Ceilings.measure())
    context = args.prompt_len + (SHORT + args.output_len) / 2
    name = f"decode step, batch {args.batch_size}, context {context:.0f}"
    emit(args, name, "ms", times, floors.decode_ms(args.batch_size * context))


if __name__ == "__main__":
    main()
