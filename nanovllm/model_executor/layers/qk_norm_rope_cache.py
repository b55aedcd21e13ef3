"""From the QKV projection to what attention reads, in one pass: norm, rotation, write to the cache.

Each of these steps is small and moves the whole of q and k, or k and v, through memory. Fused, qkv
is read once, q and k are written back where they were, and k and v go to their slots:

    qkv [T, q heads | k heads | v heads]   one program: one token, some of its heads
        q   RMSNorm (Qwen3 only) -> rotate -> back into qkv
        k   RMSNorm (Qwen3 only) -> rotate -> back into qkv, and to kv_cache[block, 0, offset]
        v                                                    to kv_cache[block, 1, offset]

It rounds where the separate layers do, so what it gives is theirs bit for bit, up to the order in
which the norm adds up squares.

Upstream: csrc/fused_qknorm_rope_kernel.cu fuses the first two steps, csrc/cache_kernels.cu's
reshape_and_cache_flash is the third (0.23.0).
Left out: interleaved rotation, quantized caches.
"""

from __future__ import annotations

import torch

from nanovllm.model_executor.layers.layernorm import RMSNorm, round_norm
from nanovllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from nanovllm.pdl import pdl_options
from nanovllm.triton_utils import tl, triton, use_triton


def qk_norm_rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    rotary_emb: RotaryEmbedding,
    num_heads: int,
    num_kv_heads: int,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn q and k by their positions, in place, and write k and v to the cache.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_size]. Its q and k are overwritten.
        positions: [num_tokens] int64.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], keys then values.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset; a token with a negative
            slot (padding) is not written to the cache.
        rotary_emb: has the table of cosines and sines, and the head size.
        q_norm, k_norm: what Qwen3 does to each head before the rotation, with the same epsilon;
            both or neither.

    Returns:
        q [num_tokens, num_heads * head_size], k and v [num_tokens, num_kv_heads * head_size]: views
        of qkv.
    """
    function = qk_norm_rope_and_cache_cuda if use_triton(qkv) else qk_norm_rope_and_cache_native
    function(
        qkv,
        positions,
        kv_cache,
        slot_mapping,
        rotary_emb=rotary_emb,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_norm=q_norm,
        k_norm=k_norm,
    )
    return _split(qkv, rotary_emb.head_size, num_heads, num_kv_heads)


def _split(
    qkv: torch.Tensor, head_size: int, num_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_size, kv_size = num_heads * head_size, num_kv_heads * head_size
    q, k, v = qkv.split([q_size, kv_size, kv_size], dim=-1)
    return q, k, v


def qk_norm_rope_and_cache_native(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    rotary_emb: RotaryEmbedding,
    num_heads: int,
    num_kv_heads: int,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
) -> None:
    """The definition: the layers one after the other."""
    head_size = rotary_emb.head_size
    q, k, v = _split(qkv, head_size, num_heads, num_kv_heads)
    new_q, new_k = q, k
    if q_norm is not None and k_norm is not None:
        new_q = q_norm.forward_native(q.unflatten(-1, (-1, head_size))).flatten(1)  # type: ignore[union-attr]
        new_k = k_norm.forward_native(k.unflatten(-1, (-1, head_size))).flatten(1)  # type: ignore[union-attr]
    new_q, new_k = rotary_emb(positions, new_q, new_k)
    q.copy_(new_q)
    k.copy_(new_k)

    tokens = torch.nonzero(slot_mapping >= 0).squeeze(1)
    slots, block_size = slot_mapping[tokens], kv_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    kv_cache[blocks, 0, offsets] = k[tokens].unflatten(-1, (num_kv_heads, head_size))
    kv_cache[blocks, 1, offsets] = v[tokens].unflatten(-1, (num_kv_heads, head_size))


@triton.jit
def qk_norm_rope_and_cache_kernel(
    qkv_ptr,  # [num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE]
    positions_ptr,  # [num_tokens] int64
    cos_sin_ptr,  # [max_position, HEAD_SIZE] float32
    q_weight_ptr,  # [HEAD_SIZE], or None: no norm
    k_weight_ptr,
    eps,
    kv_cache_ptr,  # [num_blocks, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE]
    slot_mapping_ptr,  # [num_tokens] int64
    block_stride: tl.int64,
    kv_stride: tl.int64,  # from a block's keys to its values
    slot_stride: tl.int64,
    head_stride: tl.int64,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens in a block of the cache
    HEADS: tl.constexpr,
    HALF: tl.constexpr,  # HEAD_SIZE / 2 or the power of two above it
    USE_PDL: tl.constexpr,
):
    """Program (t, i) does heads [i * HEADS, (i + 1) * HEADS) of token t, counted through q, k, v.

    A head is held as its halves, whose components i are the pairs that are turned.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    i = tl.arange(0, HALF)
    in_half = i < HEAD_SIZE // 2
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half[None, :]
    row_size = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE
    x_ptrs = qkv_ptr + token * row_size + head[:, None] * HEAD_SIZE + i[None, :]
    if q_weight_ptr is not None:
        q_weight1 = tl.load(q_weight_ptr + i, mask=in_half, other=0.0)
        q_weight2 = tl.load(q_weight_ptr + HEAD_SIZE // 2 + i, mask=in_half, other=0.0)
        k_weight1 = tl.load(k_weight_ptr + i, mask=in_half, other=0.0)
        k_weight2 = tl.load(k_weight_ptr + HEAD_SIZE // 2 + i, mask=in_half, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions_ptr + token)
    slot = tl.load(slot_mapping_ptr + token)
    x1 = tl.load(x_ptrs, mask=mask, other=0.0)
    x2 = tl.load(x_ptrs + HEAD_SIZE // 2, mask=mask, other=0.0)
    # Rounded to the model's dtype before they are multiplied, as RotaryEmbedding does.
    cos_sin_ptrs = cos_sin_ptr + position * HEAD_SIZE + i
    cos = tl.load(cos_sin_ptrs, mask=in_half, other=0.0).to(x1.dtype)[None, :]
    sin = tl.load(cos_sin_ptrs + HEAD_SIZE // 2, mask=in_half, other=0.0).to(x1.dtype)[None, :]

    y1, y2 = x1, x2
    if q_weight_ptr is not None:
        squares = x1.to(tl.float32) * x1.to(tl.float32) + x2.to(tl.float32) * x2.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / HEAD_SIZE + eps)[:, None]
        y1 = round_norm(x1, rstd, tl.where(is_q[:, None], q_weight1[None, :], k_weight1[None, :]))
        y2 = round_norm(x2, rstd, tl.where(is_q[:, None], q_weight2[None, :], k_weight2[None, :]))
    rotated1 = _add(_mul(y1, cos), -_mul(y2, sin))
    rotated2 = _add(_mul(y2, cos), _mul(y1, sin))
    y1 = tl.where(is_v[:, None], x1, rotated1)
    y2 = tl.where(is_v[:, None], x2, rotated2)

    mask_qk = mask & (~is_v)[:, None]
    tl.store(x_ptrs, y1, mask=mask_qk)
    tl.store(x_ptrs + HEAD_SIZE // 2, y2, mask=mask_qk)

    kv_head = tl.where(is_v, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
    slot_ptr = kv_cache_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    head_offset = tl.where(is_v, kv_stride, 0) + kv_head * head_stride
    cache_ptrs = slot_ptr + head_offset[:, None] + i[None, :]
    first_kv_head = tl.where(slot >= 0, NUM_HEADS, NUM_HEADS + 2 * NUM_KV_HEADS)  # padding: none
    mask_kv = mask & (head >= first_kv_head)[:, None]
    tl.store(cache_ptrs, y1, mask=mask_kv)
    tl.store(cache_ptrs + HEAD_SIZE // 2, y2, mask=mask_kv)


@triton.jit
def _mul(x, y):
    """The product as torch rounds it."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)


@triton.jit
def _add(x, y):
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


def qk_norm_rope_and_cache_cuda(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    rotary_emb: RotaryEmbedding,
    num_heads: int,
    num_kv_heads: int,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    use_pdl: bool | None = None,
) -> None:
    """The kernel. Few tokens are spread out, a warp a head; of many tokens a program does all
    heads, at most 4,096 numbers, eight in each half a thread."""
    num_tokens = qkv.shape[0]
    assert qkv.is_contiguous() and kv_cache.stride(-1) == 1
    if num_tokens == 0:
        return
    all_heads = num_heads + 2 * num_kv_heads
    half = triton.next_power_of_2(rotary_emb.head_size // 2)
    heads, num_warps = 1, 1
    if num_tokens > 32:
        heads = min(triton.next_power_of_2(all_heads), max(1, 2048 // half))
        num_warps = min(8, max(1, heads * half // 256))
    block_stride, kv_stride, slot_stride, head_stride, _ = kv_cache.stride()
    qk_norm_rope_and_cache_kernel[(num_tokens, triton.cdiv(all_heads, heads))](
        qkv,
        positions,
        rotary_emb.cos_sin_cache,
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.variance_epsilon,
        kv_cache,
        slot_mapping,
        block_stride,
        kv_stride,
        slot_stride,
        head_stride,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=rotary_emb.head_size,
        BLOCK_SIZE=kv_cache.shape[2],
        HEADS=heads,
        HALF=half,
        num_warps=num_warps,
        **pdl_options(qkv.device, use_pdl),
    )
