"""Write a batch's keys and values to their slots of the paged KV cache.

Upstream: vllm/v1/attention/ops/triton_reshape_and_cache_flash.py (0.23.0)
Left out: quantized caches.
"""

from __future__ import annotations

import torch

from nanovllm.triton_utils import tl, triton


@triton.jit
def reshape_and_cache_kernel_flash(
    key_ptr,
    value_ptr,
    kv_cache_ptr,
    slot_mapping_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens a block of the cache
    ROW: tl.constexpr,  # NUM_KV_HEADS * HEAD_SIZE or the power of two above it
):
    """One program moves one token, all heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:  # a token that pads the batch
        return
    offsets = tl.arange(0, ROW)
    mask = offsets < NUM_KV_HEADS * HEAD_SIZE
    head, dim = offsets // HEAD_SIZE, offsets % HEAD_SIZE
    key = tl.load(
        key_ptr + token * stride_key_token + head * stride_key_head + dim, mask=mask, other=0.0
    )
    value = tl.load(
        value_ptr + token * stride_value_token + head * stride_value_head + dim,
        mask=mask,
        other=0.0,
    )
    # A block is BLOCK_SIZE rows of keys, then as many of values.
    key_row = slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
    key_cache_ptr = kv_cache_ptr + key_row * (NUM_KV_HEADS * HEAD_SIZE)
    tl.store(key_cache_ptr + offsets, key, mask=mask)
    tl.store(key_cache_ptr + BLOCK_SIZE * NUM_KV_HEADS * HEAD_SIZE + offsets, value, mask=mask)


def reshape_and_cache_flash(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """kv_cache[slot // block_size, :, slot % block_size] = key, value for every token's slot.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size], each head contiguous.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], contiguous.
        slot_mapping: [num_tokens] int64; tokens with a negative slot are skipped. If it is shorter
            than key, the tokens past its end are, too.
    """
    _, _, block_size, num_kv_heads, head_size = kv_cache.shape
    row = triton.next_power_of_2(num_kv_heads * head_size)
    reshape_and_cache_kernel_flash[(len(slot_mapping),)](
        key,
        value,
        kv_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        ROW=row,
        # 16 bytes a thread, so that a short row leaves no warp idle.
        num_warps=min(max(row // 256, 1), 8),
    )
