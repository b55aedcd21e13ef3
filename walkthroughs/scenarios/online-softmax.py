"""A running maximum and sum: merged by hand, by the lanes of a kernel, and by its programs.

The row is made of logarithms, so that every exponential is a whole number of 32nds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import torch

from nanovllm.lab import memory_traffic as traffic
from nanovllm.lab.online_softmax import (
    OnlineSoftmaxConfig,
    choose_config,
    merge,
    online_softmax,
    online_softmax_reference,
)
from nanovllm.triton_utils import HAS_TRITON

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.lab.support import interpreted_traffic

if not HAS_TRITON:
    raise RuntimeError("this scenario runs a Triton kernel; Triton is for Linux.")

EXPONENTIALS = torch.tensor([[2.0, 4.0, 8.0, 1.0, 16.0, 1.0]])
X = EXPONENTIALS.log()
LANES = torch.tensor([[1.0, 2.0, 4.0, 8.0, 8.0, 2.0, 2.0, 2.0, 1.0, 2.0]]).log()
SMS = 132  # of an H200


def groupings() -> list[tuple[float, float]]:
    """The state of X's three tiles, merged from the left, from the right, and out of order."""
    a, b, c = ((tile.amax(), (tile - tile.amax()).exp().sum()) for tile in X.split(2, dim=-1))
    merged = [merge(merge(a, b), c), merge(a, merge(b, c)), merge(merge(c, a), b)]
    return [(m.item(), s.item()) for m, s in merged]


def one_program_a_row() -> tuple[torch.Tensor, int]:
    """Tiles of 4; the result and the bytes moved."""
    with interpreted_traffic() as moved:
        out = online_softmax(LANES, config=OnlineSoftmaxConfig(4, 1, 1, 1))
    return out, sum(moved.values())


def three_programs_a_row() -> tuple[torch.Tensor, int]:
    """Tiles of 2, a tile a program."""
    with interpreted_traffic() as moved:
        out = online_softmax(X, config=OnlineSoftmaxConfig(2, 3, 1, 1))
    return out, sum(moved.values())


def main() -> None:
    print("in tiles:", online_softmax_reference(X, block=2).tolist())
    print("grouped:", groupings())
    out, moved = one_program_a_row()
    print(f"one program: {out.tolist()}, {moved} bytes")
    for num_rows, num_cols in ((4096, 2**17), (256, 2**20), (4, 2**20), (1, 151936)):
        config = choose_config(num_rows, num_cols, itemsize=4, sms=SMS)
        needed = traffic.softmax_online(num_rows, num_cols, 4, config.num_splits)
        print(f"{num_rows} rows of {num_cols}: {config}, {needed.ratio:.4f} times what is needed")
    out, moved = three_programs_a_row()
    print(f"three programs: {out.tolist()}, {moved} bytes")


if __name__ == "__main__":
    main()
