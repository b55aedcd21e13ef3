"""A softmax one operation at a time, then fused, with every byte counted.

The kernel is interpreted by Triton on the CPU, one program after another; the bytes that torch and
the kernel move are counted by the tests' helpers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import torch

from nanovllm.lab import memory_traffic as traffic
from nanovllm.lab.softmax import MAX_COLS, SoftmaxConfig, choose_config, softmax, softmax_reference
from nanovllm.triton_utils import HAS_TRITON
from nanovllm.v1.metrics.hardware import HARDWARE

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.lab.support import TorchTraffic, interpreted_traffic

if not HAS_TRITON:
    raise RuntimeError("this scenario runs a Triton kernel; Triton is for Linux.")

H200 = HARDWARE["h200"]
INF = float("inf")
X = torch.tensor(
    [[0, 1, 2, 3, 4], [3, 3, 3, 3, 3], [100, 0, 0, 0, 100], [-INF, 0, -INF, 0, -INF]],
    dtype=torch.float32,
)
ROWS, COLS = 16384, 16384  # on paper

with TorchTraffic():
    torch.zeros(1)  # the first operation that it sees imports much


def overflow() -> tuple[torch.Tensor, torch.Tensor]:
    """The formula as it is written, and with the maximum taken off first."""
    row = X[2]
    return row.exp() / row.exp().sum(), (row - 100).exp() / (row - 100).exp().sum()


def count() -> tuple[int, int, float]:
    """Bytes moved by five torch calls and by the kernel, and how far their results differ."""
    with TorchTraffic() as separate:
        expected = softmax_reference(X)
    with interpreted_traffic() as fused:
        out = softmax(X, config=SoftmaxConfig(block_rows=2, num_warps=1))
    return separate.moved, sum(fused.values()), (out - expected).abs().max().item()


def on_paper() -> list[float]:
    """Milliseconds on an H200, if all that counts is bytes."""
    steps = [
        traffic.softmax_unfused(ROWS, COLS, 4),
        traffic.softmax_online(ROWS, COLS, 4),
        traffic.softmax_fused(ROWS, COLS, 4),
    ]
    for step in steps:
        print(f"{step.step}: {step.moved:,} bytes for {step.needed:,} ({step.note})")
    return [1e3 * step.moved / H200.bandwidth for step in steps]


def main() -> None:
    written, shifted = overflow()
    print("exp of 100:", written.tolist(), "shifted:", shifted.tolist())
    separate, fused, error = count()
    print(f"{separate} bytes one call at a time, {fused} fused; they differ by {error:.1e}")
    print("ms on an H200, at best:", on_paper())
    print("FLOP/byte an H200 has in float32:", H200.ridge("float32"))
    for stride in (1, 2, 8, COLS):
        load = traffic.strided_load(stride, 4)
        print(f"{load.step}: {load.moved} bytes for {load.needed}")
    for num_cols in (256, 1000, 8192, MAX_COLS):
        print(num_cols, choose_config(num_cols))
    try:
        softmax(torch.zeros(1, MAX_COLS + 1))
    except ValueError as e:
        print(e)


if __name__ == "__main__":
    main()
