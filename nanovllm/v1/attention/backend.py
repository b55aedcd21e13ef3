"""The interface between the model runner and an attention backend.

A backend is three things: the shape it wants the KV cache in, a builder that turns the step's batch
into the metadata its kernels need (once a step), and the implementation that every layer calls,
first to write the batch's keys and values to the cache, then to attend.

Upstream: vllm/v1/attention/backend.py (0.23.0)
Left out: MLA, sinks, ALiBi, encoder attention, cascade attention, quantized KV caches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Generic, TypeVar

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


class AttentionCGSupport(Enum):
    """Which batches a backend can attend to inside a CUDA graph."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # every request computes one token


M = TypeVar("M")


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Turns CommonAttentionMetadata into a backend's own metadata, once a step.

    Args:
        block_size: tokens a block of the KV cache.
        num_heads, num_kv_heads, head_size: of every layer.
        max_num_reqs: the most requests in one batch; None: not known.
        device: where the batch is; None: a CPU.
        dtype: of keys and values.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        max_num_reqs: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.block_size = block_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.max_num_reqs = max_num_reqs
        self.device = device if device is not None else torch.device("cpu")
        self.dtype = dtype

    @abstractmethod
    def build(self, common_attn_metadata: CommonAttentionMetadata) -> M: ...

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Metadata for recording a graph, which will be replayed for other batches of this size.

        What it says may depend on the number of requests and on the addresses of the device
        tensors, on nothing else: lengths, slots and blocks are read by the kernels, from those
        addresses, at each replay. Rows that pad a batch have a query length and a seq_len of 0, and
        their tokens slot -1.

        Raises:
            NotImplementedError: cudagraph_support is NEVER.
        """
        raise NotImplementedError(f"{type(self).__name__} has no metadata for CUDA graphs")

    def prepare_for_replay(self, common_attn_metadata: CommonAttentionMetadata) -> None:
        """Called before a graph is replayed for this batch: refill what `build` computes and the
        recorded kernels read. Nothing, unless a backend keeps such a thing."""


class AttentionImpl(ABC, Generic[M]):
    """One layer's attention over the paged KV cache, in two calls.

    The order matters: all of the batch is written before any of it is read, because a request may
    read blocks that another request of the same batch fills in this very step (see
    BlockPool.cache_full_blocks).
    """

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads

    @abstractmethod
    def do_kv_cache_update(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
        kv_cache: torch.Tensor,  # AttentionBackend.get_kv_cache_shape
        attn_metadata: M,
    ) -> None:
        """Write the batch's keys and values to their slots.

        A model that has done so itself (fused with its rotary embedding, say) skips this call.
        """

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_size]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
        kv_cache: torch.Tensor,  # AttentionBackend.get_kv_cache_shape
        attn_metadata: M,
        output: torch.Tensor | None = None,  # like query, contiguous; None: a new tensor
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_size]
        """Attend; the cache holds the batch's keys and values already.

        They are passed once more, for a prompt whose whole context is in this batch can be attended
        to where it is. The three may be strided views (slices of one projection's output), each
        head contiguous.
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
    def validate_configuration(
        device_type: str, head_size: int, dtype: torch.dtype, block_size: int
    ) -> list[str]:
        """Why this backend cannot run here, one reason an entry; empty if it can."""
        return []

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """One layer's cache: keys at [:, 0], values at [:, 1]."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)
