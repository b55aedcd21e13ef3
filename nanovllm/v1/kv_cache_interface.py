"""How much memory a layer's KV cache takes, and how many blocks that makes.

Upstream: vllm/v1/kv_cache_interface.py (0.23.0)
Left out: several KV-cache groups, sliding-window, MLA, mamba and quantized specs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FullAttentionSpec:
    """One layer's KV cache. Every layer of our models has the same."""

    block_size: int  # tokens
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class KVCacheConfig:
    """The size of the paged KV cache. `num_blocks` counts the null block (block 0)."""

    num_blocks: int
    num_layers: int
    kv_cache_spec: FullAttentionSpec

    @property
    def size_bytes(self) -> int:
        return self.num_blocks * self.num_layers * self.kv_cache_spec.page_size_bytes
