"""Attention with the Triton kernels of ops/, for GPUs.

The builder decides once a step which kernel serves which rows of the batch, and every layer
launches what it was told:

    kind     query   context before   served by
    decode   1       any              decode_attention: all such rows of the batch at once
    chunk    > 1     any              prefill_attention: a list of query blocks
    prompt   long    none             torch's dense attention, on the batch's own keys and values:
                                      its whole context is there, so nothing is paged. What is left
                                      of it after a multiple of DENSE_MULTIPLE tokens is a chunk.

A batch of decode rows only needs nothing from the host but the number of requests, so that a CUDA
graph of it can be replayed for other batches.

Upstream: vllm/v1/attention/backends/triton_attn.py (0.23.0)
Left out: sliding windows, ALiBi, soft caps, sinks, encoder attention, cascade attention, quantized
KV caches.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.triton_utils import HAS_TRITON, num_compute_units
from nanovllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from nanovllm.v1.attention.ops.triton_reshape_and_cache_flash import reshape_and_cache_flash
from nanovllm.v1.attention.ops.triton_unified_attention import (
    DecodeConfig,
    PrefillConfig,
    Segments,
    decode_attention,
    get_decode_config,
    get_num_segments,
    get_prefill_config,
    prefill_attention,
)
from nanovllm.v1.utils import CpuGpuBuffer, async_tensor_h2d

# Dense attention takes multiples of so many tokens of a prompt: cuDNN plans anew for each length
# that it has not seen, and that costs more than one prompt gains.
DENSE_MULTIPLE = 2048
MAX_HEAD_SIZE = 256


@dataclass
class TritonAttentionMetadata:
    """What every layer does with this step's batch."""

    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32
    block_table: torch.Tensor  # [num_reqs, max_num_blocks_per_req] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64
    req_order: torch.Tensor  # [num_reqs] int32, the builder's: longest contexts first
    segments: Segments  # the builder's, used by one layer after the other
    decode_config: DecodeConfig | None  # None: no request computes one token
    prefill_config: PrefillConfig | None = None  # None: there are no query blocks
    query_blocks: torch.Tensor | None = None  # [num_query_blocks, 2] int32: request, first token
    dense_prompts: list[slice] = field(default_factory=list)  # tokens of the batch


class TritonAttentionBackend(AttentionBackend):
    """The backend "TRITON_ATTN"."""

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return TritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return TritonAttentionMetadataBuilder

    @staticmethod
    def validate_configuration(
        device_type: str, head_size: int, dtype: torch.dtype, block_size: int
    ) -> list[str]:
        """On a CPU the kernels run in Triton's interpreter, if that was asked for: slow, but a
        debugger stops in them. (Its products of bfloat16 are wrong.)"""
        reasons = []
        if not HAS_TRITON:
            reasons.append("Triton is not installed")
        if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            reasons.append("a CPU runs Triton kernels only with TRITON_INTERPRET=1")
        elif device_type == "cpu" and dtype != torch.float32:
            reasons.append("Triton's interpreter computes in float32 only")
        elif device_type not in ("cpu", "cuda"):
            reasons.append(f"its kernels run on cuda, not on {device_type}")
        if head_size > MAX_HEAD_SIZE:
            reasons.append(f"heads of {head_size} are larger than {MAX_HEAD_SIZE}")
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reasons.append(f"it has no kernels for {dtype}")
        return reasons


class TritonAttentionMetadataBuilder(AttentionMetadataBuilder[TritonAttentionMetadata]):
    """Sorts the batch's rows by the kernel that serves them; never waits for the device.

    Attributes:
        num_sms: multiprocessors of the device, by which contexts are cut into segments.
        dense_multiple: DENSE_MULTIPLE, or None where dense attention is not used.
    """

    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_sms = num_compute_units(self.device)
        self.dense_multiple: int | None = None
        if self.device.type == "cuda" and has_dense_attention(
            self.device, self.head_size, self.dtype
        ):
            self.dense_multiple = DENSE_MULTIPLE
        # Allocated once: graphs keep their addresses.
        self.segments = self._allocate_segments(self.max_num_reqs or 1)
        self.req_order = self._allocate_req_order(self.max_num_reqs or 1)

    def build(self, common_attn_metadata: CommonAttentionMetadata) -> TritonAttentionMetadata:
        metadata = self.build_for_cudagraph_capture(common_attn_metadata)
        self.prepare_for_replay(common_attn_metadata)
        if common_attn_metadata.max_query_len > 1:
            self._add_prefills(metadata, common_attn_metadata)
        return metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonAttentionMetadata:
        """Every request computes one token."""
        num_reqs = common_attn_metadata.num_reqs
        if num_reqs * self.num_kv_heads > len(self.segments.segm_arrivals):
            assert self.max_num_reqs is None, f"{num_reqs} requests > {self.max_num_reqs}"
            self.segments = self._allocate_segments(num_reqs)
        if num_reqs > len(self.req_order.np):
            self.req_order = self._allocate_req_order(num_reqs)
        return TritonAttentionMetadata(
            query_start_loc=common_attn_metadata.query_start_loc,
            seq_lens=common_attn_metadata.seq_lens,
            block_table=common_attn_metadata.block_table_tensor,
            slot_mapping=common_attn_metadata.slot_mapping,
            req_order=self.req_order.gpu[:num_reqs],
            segments=self.segments,
            decode_config=get_decode_config(
                num_reqs, self.num_kv_heads, self.head_size, self.dtype, self.num_sms
            ),
        )

    def prepare_for_replay(self, common_attn_metadata: CommonAttentionMetadata) -> None:
        num_reqs, order = common_attn_metadata.num_reqs, self.req_order.np
        order[:num_reqs] = np.argsort(-common_attn_metadata.seq_lens_cpu.numpy(), kind="stable")
        # Rows that pad a batch come last.
        order[num_reqs:] = np.arange(num_reqs, len(order))
        self.req_order.copy_to_gpu()

    def _add_prefills(
        self, metadata: TritonAttentionMetadata, common_attn_metadata: CommonAttentionMetadata
    ) -> None:
        query_start_loc = common_attn_metadata.query_start_loc_cpu.numpy()
        query_lens = np.diff(query_start_loc)
        context_lens = common_attn_metadata.seq_lens_cpu.numpy() - query_lens
        if not (query_lens == 1).any():
            metadata.decode_config = None

        # Dense attention takes the first of a prompt's tokens, query blocks the others.
        num_dense_tokens = np.zeros_like(query_lens)
        if self.dense_multiple is not None:
            is_prompt = (query_lens > 1) & (context_lens == 0)
            num_dense_tokens[is_prompt] = query_lens[is_prompt]
            num_dense_tokens -= num_dense_tokens % self.dense_multiple
            for req in np.flatnonzero(num_dense_tokens):
                start = int(query_start_loc[req])
                metadata.dense_prompts.append(slice(start, start + int(num_dense_tokens[req])))

        num_paged_tokens = np.where(query_lens > 1, query_lens - num_dense_tokens, 0)
        if num_paged_tokens.any():
            group = self.num_heads // self.num_kv_heads
            metadata.prefill_config = get_prefill_config(
                int(num_paged_tokens.max()), group, self.head_size, self.dtype
            )
            block_q = metadata.prefill_config.block_m // group
            query_blocks = torch.from_numpy(
                get_query_blocks(num_dense_tokens, num_paged_tokens, context_lens, block_q)
            )
            metadata.query_blocks = async_tensor_h2d(query_blocks, self.device)

    def _allocate_req_order(self, max_num_reqs: int) -> CpuGpuBuffer:
        req_order = CpuGpuBuffer(
            max_num_reqs,
            dtype=torch.int32,
            device=self.device,
            pin_memory=self.device.type == "cuda",
        )
        req_order.np[:] = np.arange(max_num_reqs)
        req_order.copy_to_gpu()
        return req_order

    def _allocate_segments(self, max_num_reqs: int) -> Segments:
        max_requests_segments = max(
            num_reqs * get_num_segments(num_reqs, self.num_kv_heads, self.num_sms)
            for num_reqs in range(1, max_num_reqs + 1)
        )
        return Segments.allocate(
            max_num_reqs,
            max_requests_segments,
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.device,
        )


def get_query_blocks(
    first_tokens: np.ndarray, num_tokens: np.ndarray, context_lens: np.ndarray, block_q: int
) -> np.ndarray:
    """Cut queries into blocks of `block_q` tokens.

    Args:
        first_tokens: [num_reqs], where in its query each request's blocks begin.
        num_tokens: [num_reqs], how many tokens from there on; 0: no blocks.
        context_lens: [num_reqs], tokens before the query.

    Returns:
        [num_query_blocks, 2] int32: request, first token in its query. Those that see most come
        first: started last, they would run on when the others are done.
    """
    num_blocks = -(-num_tokens // block_q)
    reqs = np.repeat(np.arange(len(num_blocks)), num_blocks)
    index_in_req = np.arange(len(reqs)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    first = first_tokens[reqs] + index_in_req * block_q
    order = np.argsort(-(context_lens[reqs] + first), kind="stable")
    return np.stack([reqs, first], axis=1)[order].astype(np.int32)


class TritonAttentionImpl(AttentionImpl[TritonAttentionMetadata]):
    """One layer."""

    def do_kv_cache_update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata,
    ) -> None:
        reshape_and_cache_flash(key, value, kv_cache, attn_metadata.slot_mapping)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        metadata = attn_metadata
        if output is None and metadata.dense_prompts == [slice(0, len(query))]:
            return dense_attention(query, key, value, self.scale)  # one whole prompt: no copy
        if output is None:
            output = query.new_empty(query.shape)
        for tokens in metadata.dense_prompts:
            output[tokens] = dense_attention(query[tokens], key[tokens], value[tokens], self.scale)
        if metadata.query_blocks is not None and metadata.prefill_config is not None:
            prefill_attention(
                output,
                query,
                kv_cache,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_table,
                metadata.query_blocks,
                self.scale,
                metadata.prefill_config,
            )
        if metadata.decode_config is not None:
            decode_attention(
                output,
                query,
                kv_cache,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_table,
                metadata.req_order,
                self.scale,
                metadata.decode_config,
                metadata.segments,
            )
        return output


def has_dense_attention(device: torch.device, head_size: int, dtype: torch.dtype) -> bool:
    """Whether cuDNN's attention runs on `device`, and is the fastest there: from Hopper on."""
    return (
        torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and head_size % 8 == 0
        and head_size <= 128
    )


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of one whole prompt to itself, without a cache.

    Args:
        query: [num_tokens, num_heads, head_size].
        key, value: [num_tokens, num_kv_heads, head_size].

    Returns:
        [num_tokens, num_heads, head_size]
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    if q.is_cuda:
        # What scaled_dot_product_attention calls when it chooses cuDNN. Its own choice is another
        # one, and torch.nn.attention.sdpa_kernel takes longer to change it than a launch.
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, False, is_causal=True, scale=scale
        )[0]
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
