"""Paged decode: one query a sequence, keys and values in pages, the keys split over programs.

Decoding has one query a sequence, so FlashAttention's grid of query tiles is empty: what is left is
to read the whole KV cache once, as fast as memory gives it. Three things decide about that.

- Pages. A sequence's keys lie in blocks of block_size slots anywhere in the cache; the block table
  says where. A program looks a token's block up and reads its row; nothing is copied together.
- Heads. The query heads of one KV head need the same keys and values. One program serves them all,
  so the cache is read once and not once a query head. They are the rows of a matrix product.
- Splits. With few sequences, one program for each sequence and KV head leaves most of the GPU idle.
  The keys are split over several; each leaves a softmax over its own part and that part's weight
  (the logarithm of its sum of exponentials), and a second kernel takes the weighted mean.

Upstream: vllm/v1/attention/ops/triton_unified_attention.py (0.23.0), whose 3D form splits the keys
the same way. Splitting is Flash-Decoding's (Dao, Haziza, Massa and Sizov, 2023).
Left out: several queries a sequence (prefill, speculative decoding), sliding windows, FP8 caches.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nanovllm.lab.flash_attention import attention_reference
from nanovllm.lab.launch import check_input, output_like
from nanovllm.triton_utils import num_compute_units, tl, triton


class PagedDecodeConfig(NamedTuple):
    """How the work is cut.

    Attributes:
        block_n: keys a tile, a power of two, at least 16. Independent of the cache's block_size.
        num_splits: programs that share a sequence's keys.
        num_warps: warps a program.
        num_stages: tiles of keys and values in shared memory: one computed on, the others coming.
    """

    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int


def choose_config(
    batch: int, num_kv_heads: int, max_seq_len: int, dtype: torch.dtype, sms: int
) -> PagedDecodeConfig:
    """Enough programs for every multiprocessor to have several, which read while others compute.

    A split below 256 keys is not worth its share of the second kernel. 4 warps: the product has 16
    rows, most of them padding, so there is little to compute, and the reads are what counts.
    """
    block_n, num_stages = (32, 1) if dtype == torch.float32 else (64, 3)
    wanted = triton.cdiv(8 * sms, batch * num_kv_heads)
    num_splits = max(1, min(wanted, triton.cdiv(max_seq_len, 256), 128))
    return PagedDecodeConfig(block_n, num_splits, 4, num_stages)


@triton.jit
def _paged_decode_kernel(
    q_ptr, kv_ptr, block_tables_ptr, seq_lens_ptr, out_ptr, lse_ptr, scale_log2,
    stride_q, stride_q_head, stride_block, stride_v, stride_slot, stride_kv_head, stride_table,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: the GROUP query heads of one KV head over one split of one sequence's keys.
    Grid (num_kv_heads, num_splits, batch). out [batch, num_heads, num_splits, head_size], lse
    (in powers of two) [batch, num_heads, num_splits].

    Bytes: 2 * head_size * itemsize for each key, once. q, the block table and the partial results
    are small beside it.
    FLOPs: 4 * head_size * GROUP for each key, so GROUP FLOPs a byte in bfloat16. The GPU can do
    more than a hundred: the kernel's time is the cache's bytes over the bandwidth. (The product has
    BLOCK_H rows, as the matrix unit's least is 16. The padding is free.)
    """
    # The KV head is the fastest index. A slot's heads lie side by side, so programs that run at the
    # same time read neighbouring rows of head_size elements (256 bytes for 128 in bfloat16).
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_splits = tl.num_programs(0), tl.num_programs(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    tiles_per_split = tl.cdiv(tl.cdiv(seq_len, BLOCK_N), num_splits)
    begin = split * tiles_per_split * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, seq_len)

    rows = tl.arange(0, BLOCK_H)
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, BLOCK_D)
    exists = (rows < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    q_offsets = heads[:, None] * stride_q_head + dims[None, :]
    q = tl.load(q_ptr + seq.to(tl.int64) * stride_q + q_offsets, mask=exists, other=0.0)

    kv_ptr += kv_head * stride_kv_head
    block_tables_ptr += seq.to(tl.int64) * stride_table
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    # The lowest float32 and not -inf, as a split without keys must not make NaN.
    row_max = tl.full((BLOCK_H,), -3.4028234663852886e38, tl.float32)
    row_sum = tl.zeros((BLOCK_H,), tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        # Slots past the end hold what others left there, perhaps NaN, and 0 * NaN is NaN.
        valid = keys < end
        block = tl.load(block_tables_ptr + keys // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        slots = block * stride_block + (keys % BLOCK_SIZE) * stride_slot
        kv_offsets = slots[:, None] + dims[None, :]
        kv_mask = valid[:, None] & (dims < HEAD_SIZE)[None, :]
        k = tl.load(kv_ptr + kv_offsets, mask=kv_mask, other=0.0)
        v = tl.load(kv_ptr + stride_v + kv_offsets, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        p = tl.exp2(scores - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        row_max = new_max

    # A split without keys: zeros, of weight 2^-inf = 0.
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), row_max + tl.log2(row_sum))
    partials = (seq.to(tl.int64) * num_kv_heads * GROUP + heads) * num_splits + split
    out_offsets = partials[:, None] * HEAD_SIZE + dims[None, :]
    tl.store(out_ptr + out_offsets, acc / row_sum[:, None], mask=exists)
    tl.store(lse_ptr + partials, lse, mask=rows < GROUP)


@triton.jit
def _reduce_splits_kernel(
    partial_ptr, lse_ptr, out_ptr, num_splits,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: the weighted mean over the splits for one query head. Grid (num_heads, batch).

    Bytes: num_splits * (head_size + 1) float32 read a head. Against the keys a split has read for
    the head's group, that is little as long as a split has many more keys than a group has heads.
    """
    head = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    splits, dims = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    in_range = splits < num_splits
    lse = tl.load(lse_ptr + head * num_splits + splits, mask=in_range, other=float("-inf"))
    # No split has keys if the sequence has none: -inf - (-inf) would be NaN.
    highest = tl.maximum(tl.max(lse, axis=0), -3.4028234663852886e38)
    weights = tl.exp2(lse - highest)
    total = tl.sum(weights, axis=0)
    weights /= tl.where(total == 0.0, 1.0, total)
    offsets = (head * num_splits + splits)[:, None] * HEAD_SIZE + dims[None, :]
    mask = in_range[:, None] & (dims < HEAD_SIZE)[None, :]
    partial = tl.load(partial_ptr + offsets, mask=mask, other=0.0)
    out = tl.sum(partial * weights[:, None], axis=0)
    tl.store(out_ptr + head * HEAD_SIZE + dims, out, mask=dims < HEAD_SIZE)


def merge_attn_states(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys from attention over each: ([..., head_size], lse [...]).

    lse is the natural logarithm of a set's sum of exponentials, -inf for an empty set.
    """
    lse = torch.logaddexp(a[1], b[1])
    # Two empty sets make an empty one: zeros, not exp(-inf + inf).
    base = lse.clamp_min(torch.finfo(lse.dtype).min)
    out = sum(x * torch.exp(x_lse - base)[..., None] for x, x_lse in (a, b))
    assert isinstance(out, torch.Tensor)
    return out, lse


def paged_decode_reference(
    q: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same, with each sequence's keys and values copied together. As `paged_decode`."""
    out = torch.zeros_like(q)
    for i, seq_len in enumerate(seq_lens.tolist()):
        if seq_len > 0:
            keys_and_values = kv_cache[block_tables[i].long().clamp_min(0)].transpose(0, 1)
            k, v = keys_and_values.flatten(1, 2)[:, :seq_len].unsqueeze(1)
            out[i] = attention_reference(q[i, None, None], k, v, scale=scale)[0, 0]
    return out


def paged_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor,
    max_seq_len: int | None = None, scale: float | None = None, out: torch.Tensor | None = None,
    config: PagedDecodeConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of each sequence's newest token over all its keys in a paged cache.

    Args:
        q: [batch, num_heads, head_size], float32, bfloat16 or float16.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], q's dtype; keys at 0, values
            at 1 of the second dimension. Any strides, except that the last dimension is contiguous.
        block_tables: [batch, max_blocks] int32: the block of positions j * block_size and on is
            block_tables[i, j]. Entries past a sequence's length are not looked at.
        seq_lens: [batch] int32: keys of each sequence, the newest token's included. 0 gives zeros.
        max_seq_len: an upper bound of seq_lens, to choose the number of splits by without waiting
            for the device; what the block tables can hold if None.
        scale: 1 / sqrt(head_size) if None.
        out: written instead of new memory; contiguous.
        config: how to cut the work; chosen by `choose_config` if None.

    Returns: [batch, num_heads, head_size], q's dtype; sums are in float32.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    check_input("q", q)
    check_input("kv_cache", kv_cache)
    batch, num_heads, head_size = q.shape
    _, two, block_size, num_kv_heads, _ = kv_cache.shape
    if two != 2 or kv_cache.shape[-1] != head_size or num_heads % num_kv_heads:
        raise ValueError(f"q {list(q.shape)} and kv_cache {list(kv_cache.shape)} do not fit.")
    if q.dtype != kv_cache.dtype:
        raise ValueError(f"q is {q.dtype} and kv_cache {kv_cache.dtype}; they must be the same.")
    if block_tables.shape[0] != batch or seq_lens.shape != (batch,):
        raise ValueError(
            f"block_tables {list(block_tables.shape)} and seq_lens {list(seq_lens.shape)} "
            f"must have one row for each of {batch} sequences."
        )
    if block_tables.stride(-1) != 1 or not seq_lens.is_contiguous():
        raise ValueError("block_tables must have contiguous rows, and seq_lens be contiguous.")
    out = output_like(q, out)
    if out.numel() == 0:
        return out
    max_seq_len = max_seq_len or block_tables.shape[1] * block_size
    config = config or choose_config(
        batch, num_kv_heads, max_seq_len, q.dtype, num_compute_units(q.device)
    )
    block_n, num_splits, num_warps, num_stages = config
    group = num_heads // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_size))

    lse = torch.empty(batch, num_heads, num_splits, dtype=torch.float32, device=q.device)
    # A single split is the result itself.
    partial = out if num_splits == 1 else lse.new_empty(batch, num_heads, num_splits, head_size)
    _paged_decode_kernel[(num_kv_heads, num_splits, batch)](
        q, kv_cache, block_tables, seq_lens, partial, lse,
        (head_size**-0.5 if scale is None else scale) * math.log2(math.e),
        *q.stride()[:2], *kv_cache.stride()[:4], block_tables.stride(0),
        GROUP=group, HEAD_SIZE=head_size, BLOCK_SIZE=block_size,
        BLOCK_H=max(16, triton.next_power_of_2(group)), BLOCK_D=block_d, BLOCK_N=block_n,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if num_splits > 1:
        _reduce_splits_kernel[(num_heads, batch)](
            partial, lse, out, num_splits, HEAD_SIZE=head_size, BLOCK_D=block_d,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits), num_warps=4,
        )  # fmt: skip
    return out
