"""The interface between the model runner and an attention backend.

A backend is three things: the shape it wants the KV cache in, a builder that turns the step's batch
into the metadata its kernels need (once a step), and the implementation that every layer calls.

Upstream: vllm/v1/attention/backend.py (0.23.0)
Left out: MLA, sinks, ALiBi, encoder attention, cascade attention, quantized KV caches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch


@dataclass
class CommonAttentionMetadata:
    """One packed batch, described for every layer and backend.

    Three requests that compute 4, 1 and 2 tokens are one row of 7:

        tokens            a a a a b c c
        query_start_loc   0       4 5   7        (num_reqs + 1)
        seq_lens          4       9 6            context length including this step's tokens
        slot_mapping      where each token's key and value go in the paged cache
    """

    query_start_loc: torch.Tensor  # [num_reqs + 1], int32, device
    query_start_loc_cpu: torch.Tensor  # [num_reqs + 1], int32, host
    seq_lens: torch.Tensor  # [num_reqs], int32, device
    seq_lens_cpu: torch.Tensor  # [num_reqs], int32, host
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor  # [num_reqs, max_num_blocks_per_req], int32, device
    slot_mapping: torch.Tensor  # [num_tokens], int64, device; block_id * block_size + offset
    causal: bool = True


M = TypeVar("M")


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Turns CommonAttentionMetadata into a backend's own metadata, once a step."""

    def __init__(self, block_size: int, num_heads: int, num_kv_heads: int, head_size: int) -> None:
        self.block_size = block_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size

    @abstractmethod
    def build(self, common_attn_metadata: CommonAttentionMetadata) -> M: ...


class AttentionImpl(ABC, Generic[M]):
    """One layer's attention over the paged KV cache."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_size]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
        kv_cache: torch.Tensor,  # AttentionBackend.get_kv_cache_shape
        attn_metadata: M,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_size]
        """Write the whole batch's keys and values to the cache, then attend.

        The order matters: a request may read blocks that another request of the same batch fills in
        this very step (see BlockPool.cache_full_blocks).
        """


class AttentionBackend(ABC):
    """Names a backend's parts; never instantiated."""

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]: ...

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """One layer's cache: keys at [:, 0], values at [:, 1]."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)
