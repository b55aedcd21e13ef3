"""The attention layer: what a model calls, and the only thing it knows of the KV cache.

Upstream: vllm/model_executor/layers/attention/attention.py (0.23.0)
Left out: sliding windows, ALiBi, sinks, quantized KV caches, KV sharing between layers. Upstream's
layer finds its KV cache and the step's metadata in a forward context, a global; here they are
arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nanovllm.v1.attention.backend import AttentionBackend


class Attention(nn.Module):
    """Splits heads, has the backend write and read this layer's KV cache, joins heads.

    Args:
        num_heads: query heads.
        head_size: width of one head.
        scale: what query-key products are multiplied by before the softmax.
        num_kv_heads: key heads (and value heads); divides num_heads.
        layer_idx: which entry of `kv_caches` belongs to this layer.
        attn_backend: where the implementation comes from.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        layer_idx: int,
        attn_backend: type[AttentionBackend],
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads
        self.layer_idx = layer_idx
        self.impl = attn_backend.get_impl_cls()(num_heads, head_size, scale, num_kv_heads)

    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads * head_size]
        key: torch.Tensor,  # [num_tokens, num_kv_heads * head_size]
        value: torch.Tensor,  # [num_tokens, num_kv_heads * head_size]
        kv_caches: list[torch.Tensor],  # one a layer
        attn_metadata: Any,  # the backend's own
        is_cached: bool = False,  # key and value have been written to the cache
    ) -> torch.Tensor:  # [num_tokens, num_heads * head_size]
        query = query.view(-1, self.num_heads, self.head_size)
        key = key.view(-1, self.num_kv_heads, self.head_size)
        value = value.view(-1, self.num_kv_heads, self.head_size)
        kv_cache = kv_caches[self.layer_idx]
        if not is_cached:
            self.impl.do_kv_cache_update(key, value, kv_cache, attn_metadata)
        output = self.impl.forward(query, key, value, kv_cache, attn_metadata)
        return output.reshape(-1, self.num_heads * self.head_size)
