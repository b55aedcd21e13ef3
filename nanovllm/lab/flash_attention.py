"""FlashAttention forward: the online softmax, carrying a weighted sum of values.

Attention written out (`attention_reference`) makes a table of scores, one for every pair of query
and key: at 8192 tokens that is 128 MB a head in bfloat16, written, masked, normalised and read
again, while q, k, v and the output are 2 MB each. But a score is needed only until its value has
been added up. A program keeps a tile of queries on the chip and walks over the keys in tiles; for
each query it holds a running maximum, a running sum (online_softmax.py) and

    acc = sum of exp(score - maximum) * value

which shrinks by the same factor when the maximum moves. The scores never leave the chip.

From Dao et al., FlashAttention (2022), and Dao, FlashAttention-2 (2023): queries outside, keys
inside, one division at the end.

Upstream: vllm/v1/attention/ops/triton_prefill_attention.py (0.23.0) is the nearest.
Left out: packed sequences of different lengths, dropout, the backward pass, and what
FlashAttention-3 adds on Hopper (warp specialisation, ping-pong of two tiles, FP8).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nanovllm.lab.launch import check_input, output_like
from nanovllm.triton_utils import tl, triton

MAX_HEAD_SIZE = 256


class FlashAttentionConfig(NamedTuple):
    """How the work is cut.

    Attributes:
        block_m: queries a program, a power of two, at least 16.
        block_n: keys a tile, a power of two, at least 16.
        num_warps: warps a program.
        num_stages: tiles of keys and values in shared memory: one computed on, the others coming.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_config(head_size: int, dtype: torch.dtype) -> FlashAttentionConfig:
    """Tiles that fill a Hopper multiprocessor.

    - block_m 128 with 8 warps: two warpgroups of 4 warps, each of which feeds the matrix unit with
      64 rows, the height of its instruction. Every key fetched serves 128 queries, so the matrix
      unit is the limit, not the bandwidth.
    - The accumulator (block_m x head_size) and the scores (block_m x block_n) live in registers,
      in float32. 128 x 128 floats are 64 registers for each of 256 threads, of 255 at most: with a
      head of 128 the score tile is narrower, to leave some for the rest.
    - num_stages: keys and values of one stage are 2 * block_n * head_size elements of shared
      memory, of which a program can have 227 KB.

    float32 products do not run on the matrix unit at full precision; the plain multipliers do them,
    with small tiles, as their operands are in registers too.
    """
    if dtype == torch.float32:
        return FlashAttentionConfig(32, 16, 8, 1)
    if head_size <= 64:
        return FlashAttentionConfig(128, 128, 8, 3)
    if head_size <= 128:
        return FlashAttentionConfig(128, 64, 8, 3)
    return FlashAttentionConfig(64, 64, 8, 2)


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k_ptr, v_ptr, stride_k, stride_v, begin, end, last_key, scale_log2,
    num_keys, HEAD_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the keys begin to end, tile by tile, to the state (acc, row_max, row_sum).

    MASKED: not every query sees every key of the tiles. Compiled twice, as the mask costs a
    comparison and a selection for every score, and only few tiles need it.
    """
    dims = tl.arange(0, BLOCK_D)
    k_tile = tl.arange(0, BLOCK_N)[:, None] * stride_k + dims[None, :]
    v_tile = tl.arange(0, BLOCK_N)[:, None] * stride_v + dims[None, :]
    # 64-bit: a long sequence's last key can lie more than 2^31 elements after its first.
    stride_k, stride_v = tl.cast(stride_k, tl.int64), tl.cast(stride_v, tl.int64)
    for start in tl.range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        if MASKED or HEAD_SIZE != BLOCK_D:
            exists = (keys < num_keys)[:, None] & (dims < HEAD_SIZE)[None, :]
            k = tl.load(k_ptr + start * stride_k + k_tile, mask=exists, other=0.0)
            v = tl.load(v_ptr + start * stride_v + v_tile, mask=exists, other=0.0)
        else:
            k = tl.load(k_ptr + start * stride_k + k_tile)
            v = tl.load(v_ptr + start * stride_v + v_tile)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(keys[None, :] <= last_key[:, None], scores, float("-inf"))
        # exp(scale * x) = 2^(scale * log2(e) * x). The GPU's instruction is 2^x, and the factor
        # becomes part of a fused multiply-add.
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(p, axis=1)
        # p is at most 1, so rounding it to v's dtype is harmless; the sum above is of the float32.
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _flash_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, num_queries, num_keys, scale_log2,
    stride_q_batch, stride_q, stride_q_head, stride_k_batch, stride_k, stride_k_head,
    stride_v_batch, stride_v, stride_v_head, stride_out_batch, stride_out, stride_out_head,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head. Grid (query tiles, num_heads, batch).

    Bytes: q read and the output written once. k and v are read once a query tile, so
    num_queries / BLOCK_M times (half of it if causal), but from the L2 cache: the programs of one
    head run side by side. From memory they come about once.
    FLOPs: 4 * num_queries * num_keys * head_size a head (two products, a multiplication and an
    addition each), half of it if causal. For every 2 * head_size elements of k and v that is 2 *
    BLOCK_M FLOPs an element: 128 a byte in bfloat16 with BLOCK_M 128, through the L2 cache.
    """
    # Causal: the last tiles of queries see the most keys. Begun first, they do not end last, alone.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    # GQA: GROUP query heads in a row share a key head.
    kv_head = head // GROUP
    q_ptr += batch * stride_q_batch + head * stride_q_head
    k_ptr += batch * stride_k_batch + kv_head * stride_k_head
    v_ptr += batch * stride_v_batch + kv_head * stride_v_head
    out_ptr += batch * stride_out_batch + head * stride_out_head

    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    exists = (queries < num_queries)[:, None] & (dims < HEAD_SIZE)[None, :]
    q_offsets = queries.to(tl.int64)[:, None] * stride_q + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=exists, other=0.0)

    # Query i stands at position i + num_keys - num_queries: the last query sees all keys.
    # Keys before `whole` are seen by every query of the tile; none sees `end` or later.
    if CAUSAL:
        shift = num_keys - num_queries
        last_key = queries + shift
        end = tl.minimum(tl.maximum(first_query + BLOCK_M + shift, 0), num_keys)
        whole = tl.minimum(tl.maximum(first_query + 1 + shift, 0), num_keys) // BLOCK_N * BLOCK_N
    else:
        last_key = queries * 0 + num_keys - 1
        end = num_keys
        whole = num_keys // BLOCK_N * BLOCK_N
    last_key = tl.minimum(last_key, num_keys - 1)

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # The lowest float32 and not -inf: a query that has seen no key yet must not make NaN.
    row_max = tl.full((BLOCK_M,), -3.4028234663852886e38, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, stride_k, stride_v, 0, whole, last_key, scale_log2,
        num_keys, HEAD_SIZE, BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, stride_k, stride_v, whole, end, last_key,
        scale_log2, num_keys, HEAD_SIZE, BLOCK_N, BLOCK_D, True,
    )  # fmt: skip

    # A query that saw no key has sum 0; its output is 0, as FlashAttention's is.
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_offsets = queries.to(tl.int64)[:, None] * stride_out + dims[None, :]
    tl.store(out_ptr + out_offsets, out, mask=exists)


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same with the table of scores written out. Arguments and result as `flash_attention`."""
    num_queries, num_keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, heads, seq, head_size]
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q * scale) @ k.transpose(-2, -1)
    if causal:
        position = torch.arange(num_queries, device=q.device) + num_keys - num_queries
        hidden = torch.arange(num_keys, device=q.device) > position[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    # A row of only -inf has no softmax: NaN, which stands for "attends to nothing".
    probabilities = torch.softmax(scores, dim=-1)
    if causal and num_queries > num_keys:
        probabilities = probabilities.nan_to_num(nan=0.0)
    return (probabilities @ v).transpose(1, 2)


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True,
    scale: float | None = None, out: torch.Tensor | None = None,
    config: FlashAttentionConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """softmax(q k^T * scale) v, head by head.

    Causal, the last query sees all keys and each one before it one key fewer. A query that sees
    none (there are more queries than keys) gets zeros.

    Args:
        q: [batch, num_queries, num_heads, head_size], float32, bfloat16 or float16. Any strides,
            except that the last dimension is contiguous.
        k, v: [batch, num_keys, num_kv_heads, head_size], q's dtype. num_heads is a multiple of
            num_kv_heads; query head h reads key head h // (num_heads // num_kv_heads).
        causal: whether keys after a query's position are hidden.
        scale: positive; 1 / sqrt(head_size) if None.
        out: written instead of new memory; contiguous.
        config: how to cut the work; chosen by `choose_config` if None.

    Returns: [batch, num_queries, num_heads, head_size], q's dtype; sums are in float32.

    Raises:
        ValueError: shapes or dtypes do not fit together, or scale is not positive.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_input(name, x)
    batch, num_queries, num_heads, head_size = q.shape
    num_keys, num_kv_heads = k.shape[1], k.shape[2]
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_size:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit.")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; they must be the same.")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide among {num_kv_heads} key heads.")
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"head_size is {head_size}; at most {MAX_HEAD_SIZE} fits on the chip.")
    scale = head_size**-0.5 if scale is None else scale
    if scale <= 0:
        # The kernel takes the maximum before it scales.
        raise ValueError(f"scale is {scale}; it must be positive.")
    out = output_like(q, out)
    if out.numel() == 0:
        return out
    block_m, block_n, num_warps, num_stages = config or choose_config(head_size, q.dtype)
    _flash_attention_kernel[(triton.cdiv(num_queries, block_m), num_heads, batch)](
        q, k, v, out, num_queries, num_keys, scale * math.log2(math.e),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        GROUP=num_heads // num_kv_heads, HEAD_SIZE=head_size,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)), BLOCK_M=block_m, BLOCK_N=block_n,
        CAUSAL=causal, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out
