"""Online softmax: rows longer than the chip, read twice and written once.

A row that does not stay on the chip must be read at least twice: nothing can be written before the
whole row's maximum and sum are known. Computed one after the other they would cost a third read.
The online form needs one pass for both. It keeps, for what it has seen so far,

    m = the maximum           s = sum of exp(x - m)

and when a larger value moves the maximum from m to m', the sum so far shrinks by exp(m - m').
Two such states merge in the same way (`merge`), in any order and any grouping. So lanes of a
vector, tiles of a row and programs of a grid can each keep their own, and FlashAttention
(flash_attention.py) can carry a weighted sum of values along.

The algorithm is from Milakov and Gimelshein, Online normalizer calculation for softmax (2018).

Upstream: none as a kernel of its own; the running state is in vLLM's attention kernels.
Left out: the backward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.lab.launch import check_input, output_like
from nanovllm.triton_utils import num_compute_units, tl, triton


class OnlineSoftmaxConfig(NamedTuple):
    """How the work is cut.

    Attributes:
        block: elements of a row a program looks at at once, a power of two.
        num_splits: programs that share a row. 1 launches one kernel, more launch two.
        num_warps: warps a program.
        num_stages: tiles being fetched ahead while one is computed on.
    """

    block: int
    num_splits: int
    num_warps: int
    num_stages: int


def choose_config(num_rows: int, num_cols: int, itemsize: int, sms: int) -> OnlineSoftmaxConfig:
    """A row a program if the rows fill the GPU, else as many programs a row as it takes.

    Programs run in waves of a few a multiprocessor, and the last wave leaves part of the GPU idle.
    With many programs for each of the `sms` multiprocessors that part is small: one large program a
    row where there are eight rows for each, else small ones, 64 for each. (The best of
    bench_lab.py's sweep on an H200.)
    """
    is_one_a_row = num_rows >= 8 * sms
    block = (65536 if is_one_a_row else 16384) // itemsize
    tiles = triton.cdiv(num_cols, block)
    num_splits = 1
    if not is_one_a_row:
        num_splits = min(triton.cdiv(64 * sms, num_rows), triton.cdiv(tiles, 4))
    block = min(block, triton.next_power_of_2(num_cols))
    num_warps = max(1, min(32, block // 512))
    return OnlineSoftmaxConfig(block, num_splits, num_warps, num_stages=3)


@triton.jit
def _max_and_sum(row_ptr, begin, end, num_cols, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """(m, s) of the columns begin to end, `begin` at a multiple of BLOCK.

    Every lane of the tile keeps its own running state and they are merged after the loop. One state
    for all lanes would make the threads wait for each other at every tile, and loads would stop.
    """
    # The lowest float32 and not -inf: x - m must not become -inf - (-inf), which is NaN.
    m = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=NUM_STAGES):
        cols = start + tl.arange(0, BLOCK)
        # evict_last: the second pass reads this again, if it is still in the L2 cache.
        x = tl.load(
            row_ptr + cols, mask=cols < num_cols, other=float("-inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        # Of the two factors exp(m - m') and exp(x - m'), one is always exp(0) = 1, and the other is
        # the exp of minus the distance: one exp an element, not two.
        difference = x - m
        factor = tl.exp(-tl.abs(difference))
        s = tl.where(difference > 0, s * factor + 1.0, s + factor)
        m = tl.maximum(m, x)
    row_max = tl.max(m, axis=0)
    return row_max, tl.sum(s * tl.exp(m - row_max), axis=0)


@triton.jit
def _normalise(
    row_ptr, out_ptr, row_max, row_sum, begin, end, num_cols,
    BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Second pass over the columns begin to end: out = exp(x - row_max) / row_sum.

    Backwards: what the first pass read last is what the L2 cache most likely still holds.
    """
    reciprocal = 1.0 / row_sum
    num_tiles = tl.cdiv(end - begin, BLOCK)
    for tile in tl.range(0, num_tiles, num_stages=NUM_STAGES):
        cols = begin + (num_tiles - 1 - tile) * BLOCK + tl.arange(0, BLOCK)
        # evict_first, both: neither is needed again, and they shall not push other rows out.
        x = tl.load(
            row_ptr + cols, mask=cols < num_cols, other=float("-inf"), eviction_policy="evict_first"
        )
        y = tl.exp(x.to(tl.float32) - row_max) * reciprocal
        tl.store(out_ptr + cols, y, mask=cols < num_cols, eviction_policy="evict_first")


@triton.jit
def _online_softmax_kernel(x_ptr, out_ptr, num_cols, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """One program: one row, in two passes.

    Bytes: two reads and one write of the row. The second read comes from the L2 cache as far as the
    rows in progress fit there: a row of 128k floats is 512 KB, and with one row a multiprocessor
    132 of them, 66 MB, are in progress, of which the cache (50 MB) holds a part.
    FLOPs: 8 an element (subtract, exp, compare, two for the sum; subtract, exp, multiply).
    """
    offset = tl.program_id(0).to(tl.int64) * num_cols
    row_max, row_sum = _max_and_sum(x_ptr + offset, 0, num_cols, num_cols, BLOCK, NUM_STAGES)
    _normalise(
        x_ptr + offset, out_ptr + offset, row_max, row_sum, 0, num_cols, num_cols, BLOCK, NUM_STAGES
    )


@triton.jit
def _partial_max_sum_kernel(
    x_ptr, max_ptr, sum_ptr, num_cols, tiles_per_split,
    BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: (m, s) of one split of one row. Grid (num_splits, num_rows).

    Bytes: one read of the row in all; 8 bytes written a split.
    """
    split, row = tl.program_id(0), tl.program_id(1)
    begin = split * tiles_per_split * BLOCK
    end = tl.minimum(begin + tiles_per_split * BLOCK, num_cols)
    row_ptr = x_ptr + row.to(tl.int64) * num_cols
    split_max, split_sum = _max_and_sum(row_ptr, begin, end, num_cols, BLOCK, NUM_STAGES)
    tl.store(max_ptr + row * tl.num_programs(0) + split, split_max)
    tl.store(sum_ptr + row * tl.num_programs(0) + split, split_sum)


@triton.jit
def _merge_and_normalise_kernel(
    x_ptr, out_ptr, max_ptr, sum_ptr, num_cols, tiles_per_split,
    BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: merges the states of a row's splits, then writes its own split of the row.

    Bytes: one read and one write of the row in all. Every program of a row merges for itself: 8
    bytes a split, against a third launch.
    """
    # Backwards here too: the splits that the first kernel read last may still be in the L2 cache.
    num_splits = tl.num_programs(0)
    split = num_splits - 1 - tl.program_id(0)
    row = tl.num_programs(1) - 1 - tl.program_id(1)
    splits = tl.arange(0, BLOCK_SPLITS)
    state = row * num_splits + splits
    maxima = tl.load(max_ptr + state, mask=splits < num_splits, other=-3.4028234663852886e38)
    sums = tl.load(sum_ptr + state, mask=splits < num_splits, other=0.0)
    row_max = tl.max(maxima, axis=0)
    row_sum = tl.sum(sums * tl.exp(maxima - row_max), axis=0)

    begin = split * tiles_per_split * BLOCK
    end = tl.minimum(begin + tiles_per_split * BLOCK, num_cols)
    offset = row.to(tl.int64) * num_cols
    _normalise(
        x_ptr + offset, out_ptr + offset, row_max, row_sum, begin, end, num_cols, BLOCK, NUM_STAGES
    )


State = tuple[torch.Tensor, torch.Tensor]


def merge(a: State, b: State) -> State:
    """The state (m, s) of two parts of a row together. Each is two tensors of any equal shape."""
    m = torch.maximum(a[0], b[0])
    return m, a[1] * torch.exp(a[0] - m) + b[1] * torch.exp(b[0] - m)


def online_softmax_reference(x: torch.Tensor, block: int = 4096) -> torch.Tensor:
    """The same in torch, `block` columns at a time. [..., num_cols] -> same."""
    tiles = x.split(block, dim=-1)
    lowest = torch.finfo(x.dtype).min
    state = (torch.full_like(x[..., :1], lowest), torch.zeros_like(x[..., :1]))
    for tile in tiles:
        tile_max = tile.amax(dim=-1, keepdim=True).clamp_min(lowest)
        state = merge(state, (tile_max, torch.exp(tile - tile_max).sum(dim=-1, keepdim=True)))
    return torch.cat([torch.exp(tile - state[0]) / state[1] for tile in tiles], dim=-1)


def online_softmax(
    x: torch.Tensor, out: torch.Tensor | None = None, config: OnlineSoftmaxConfig | None = None
) -> torch.Tensor:
    """Softmax over the last dimension, of any length, as torch.softmax(x, -1).

    -inf gets probability 0. A row of nothing but -inf has no softmax and comes out as NaN, as
    torch's does.

    Args:
        x: [..., num_cols], contiguous, float32, bfloat16 or float16. Computed in float32.
        out: written instead of new memory.
        config: how to cut the work; chosen by `choose_config` if None.

    Raises:
        ValueError: x is not contiguous, or not a float; or there are more rows to split than a
            grid has.
    """
    check_input("x", x)
    if not x.is_contiguous():
        raise ValueError("x must be contiguous: a row starts where the row before it ends.")
    out = output_like(x, out)
    if x.numel() == 0:
        return out
    num_cols = x.shape[-1]
    num_rows = x.numel() // num_cols
    config = config or choose_config(num_rows, num_cols, x.itemsize, num_compute_units(x.device))
    block, num_splits, num_warps, num_stages = config
    if num_splits == 1:
        _online_softmax_kernel[(num_rows,)](
            x, out, num_cols, BLOCK=block, NUM_STAGES=num_stages, num_warps=num_warps
        )
        return out

    if num_rows > 65535:
        raise ValueError(f"{num_rows} rows fill the GPU as they are; num_splits must be 1.")
    tiles_per_split = triton.cdiv(triton.cdiv(num_cols, block), num_splits)
    # Rounding tiles up can leave the last splits without any; those are not launched.
    num_splits = triton.cdiv(num_cols, tiles_per_split * block)
    grid = (num_splits, num_rows)
    maxima = torch.empty(num_rows, num_splits, dtype=torch.float32, device=x.device)
    sums = torch.empty_like(maxima)
    _partial_max_sum_kernel[grid](
        x, maxima, sums, num_cols, tiles_per_split,
        BLOCK=block, NUM_STAGES=num_stages, num_warps=num_warps,
    )  # fmt: skip
    _merge_and_normalise_kernel[grid](
        x, out, maxima, sums, num_cols, tiles_per_split,
        BLOCK=block, NUM_STAGES=num_stages, BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        num_warps=num_warps,
    )  # fmt: skip
    return out
