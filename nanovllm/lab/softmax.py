"""Fused softmax: one read, one write, everything between them in registers.

Written with one torch call an operation (`softmax_reference`), a softmax walks over memory eight
times: max reads; subtract reads and writes; exp reads and writes; sum reads; divide reads and
writes. It does about five operations an element, so on a GPU all of its time is memory time, and
what counts is how many bytes move. A row that fits into one program's registers can be read once,
reduced where it is, and written once: two passes instead of eight.

Upstream: none as a kernel of its own; vLLM samples from torch.softmax.
Left out: the backward pass; rows longer than the registers (online_softmax.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.lab.launch import check_input, output_like
from nanovllm.triton_utils import tl, triton

# A multiprocessor has 256 KB of registers. A row of 128 KB still leaves room for what is computed
# along with it; the next power of two would spill to memory, which is what fusing avoids.
MAX_COLS = 32768


class SoftmaxConfig(NamedTuple):
    """How the work is cut.

    Attributes:
        block_rows: rows a program holds at once, a power of two.
        num_warps: warps (of 32 threads) a program.
    """

    block_rows: int
    num_warps: int


def choose_config(num_cols: int) -> SoftmaxConfig:
    """So that a multiprocessor always has tens of KB of reads under way.

    Memory takes hundreds of nanoseconds to answer, so bandwidth times that latency is what must be
    under way at any time, and the only askers are resident threads that have issued their loads and
    wait.

    So 8 values a thread and small programs, of which many fit on a multiprocessor: some load while
    others reduce. Rows of fewer than 512 columns share a program. (The best of bench_lab.py's sweep
    on an H200, or within 2% of it.)
    """
    block_cols = triton.next_power_of_2(num_cols)
    block_rows = max(1, 512 // block_cols)
    # Of the columns that exist, rounded down: threads of padding ask for nothing.
    num_warps = 1 << max(0, min(5, (block_rows * num_cols // 256).bit_length() - 1))
    return SoftmaxConfig(block_rows, num_warps)


@triton.jit
def _softmax_kernel(
    x_ptr, out_ptr, num_rows, num_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """One program: the softmax of BLOCK_ROWS whole rows.

    Bytes: num_rows * num_cols * itemsize read, as many written. That is the least there can be.
    FLOPs: 5 an element (max, subtract, exp, sum, multiply), so 0.6 a byte in float32. An H200 does
    14 in the time of a byte (outside its matrix units), so the kernel's time is its bytes over the
    bandwidth.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # The last program's surplus rows redo the last row and store the same values again. That costs
    # nothing, since those threads have no other work, and spares a mask.
    rows = tl.minimum(rows, num_rows - 1)
    # Coalescing: neighbouring threads take neighbouring columns, four floats (16 bytes) each, so a
    # warp's load is 512 consecutive bytes. With a thread a row instead, the 32 addresses of a warp
    # would lie in 32 different rows, and 32 bytes would be fetched for every 4 used.
    cols = tl.arange(0, BLOCK_COLS)
    # 64-bit, as tensors may have more than 2^31 elements.
    offsets = rows.to(tl.int64)[:, None] * num_cols + cols[None, :]
    # BLOCK_COLS is a power of two; -inf in the surplus columns adds exp(-inf) = 0 to the sum.
    in_row = cols[None, :] < num_cols
    x = tl.load(x_ptr + offsets, mask=in_row, other=float("-inf")).to(tl.float32)
    # exp(x) overflows float32 above 88. Subtracting the maximum changes nothing else: numerator and
    # denominator lose the same factor.
    numerator = tl.exp(x - tl.max(x, axis=1)[:, None])
    # One division a row and a multiplication an element: division is many instructions.
    reciprocal = 1.0 / tl.sum(numerator, axis=1)
    tl.store(out_ptr + offsets, numerator * reciprocal[:, None], mask=in_row)


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """The same, one operation and one pass over memory at a time. [..., num_cols] -> same."""
    row_max = x.amax(dim=-1, keepdim=True)
    shifted = x - row_max
    numerator = shifted.exp()
    denominator = numerator.sum(dim=-1, keepdim=True)
    return numerator / denominator


def softmax(
    x: torch.Tensor, out: torch.Tensor | None = None, config: SoftmaxConfig | None = None
) -> torch.Tensor:
    """Softmax over the last dimension, as torch.softmax(x, -1).

    -inf gets probability 0. A row of nothing but -inf has no softmax and comes out as NaN, as
    torch's does.

    Args:
        x: [..., num_cols], contiguous, float32, bfloat16 or float16. Computed in float32.
        out: written instead of new memory.
        config: how to cut the work; chosen by `choose_config` if None.

    Raises:
        ValueError: x is not contiguous, not a float, or its rows are longer than MAX_COLS.
    """
    check_input("x", x)
    if not x.is_contiguous():
        raise ValueError("x must be contiguous: a row starts where the row before it ends.")
    num_cols = x.shape[-1]
    if num_cols > MAX_COLS:
        raise ValueError(
            f"a row of {num_cols} does not stay on the chip; at most {MAX_COLS} do. "
            f"online_softmax takes rows of any length."
        )
    out = output_like(x, out)
    if x.numel() == 0:
        return out
    num_rows = x.numel() // num_cols
    block_rows, num_warps = config or choose_config(num_cols)
    _softmax_kernel[(triton.cdiv(num_rows, block_rows),)](
        x, out, num_rows, num_cols,
        BLOCK_ROWS=block_rows, BLOCK_COLS=triton.next_power_of_2(num_cols), num_warps=num_warps,
    )  # fmt: skip
    return out
