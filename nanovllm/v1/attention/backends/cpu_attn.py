"""Attention over the paged KV cache with torch's scaled_dot_product_attention.

A batch mixes requests that read long caches for one token, requests that bring a whole prompt, and
requests in the middle of one. Each kind has its own cheapest way, and which request is of which
kind, which cache rows it reads and what it must not see are the same in every layer: the builder
works that out once a step, and the layers only gather, attend and scatter.

    kind     query   context before    keys and values from       mask
    decode   1       any               cache, several requests    padding of the group
    prompt   > 1     none              the batch itself           causal, inside the kernel
    chunk    > 1     some              cache, one request         causal, shifted by the context

Grouped-query attention needs no repeated keys: the `group` query heads that share a key head stand
where they cost nothing, as extra query rows (decode, where all of them see the same keys) or as the
head axis over a key head expanded with stride 0 (the others).

Upstream: vllm/v1/attention/backends/cpu_attn.py (0.23.0), which calls C++ kernels that read the
cache in place. Gathering costs one more pass over the keys and values of the batch, but needs only
torch; nothing here depends on the device either, so this is also the reference that other backends
are compared with.
Left out: sliding windows, ALiBi, soft caps, encoder attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from nanovllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

# A decode group is padded to its longest context. It is closed when its padding would exceed this
# many tokens, about what the calls for one more group cost ...
MAX_GROUP_PADDING = 512  # tokens
# ... or when the keys and values gathered for it would no longer stay in the processor's cache
# until they are used. (From 32 MiB on malloc would even map fresh pages in every layer of every
# step, which takes ten times as long.)
MAX_GROUP_ELEMENTS = 1 << 20  # 4 MiB in float32


@dataclass
class DecodeGroup:
    """Requests that compute one token each, with contexts of similar length.

    Three requests with contexts of 3, 5 and 5 tokens, padded to 5:

        request 0   k k k x x        x: masked, and read from the request's first token, a slot
        request 1   k k k k k           that is surely written. (An unwritten slot may hold NaN,
        request 2   k k k k k           which no mask removes: 0 * NaN is NaN.)
    """

    token_indices: torch.Tensor  # [num_reqs] int64, each request's row in the batch
    kv_rows: torch.Tensor  # [2 * num_reqs * max_seq_len] int64, cache rows: keys, then values
    mask: torch.Tensor  # [num_reqs, 1, 1, max_seq_len] float32, 0 or -inf

    @property
    def shape(self) -> tuple[int, int]:
        """(num_reqs, max_seq_len)"""
        return self.mask.shape[0], self.mask.shape[-1]


@dataclass
class Prefill:
    """One request that computes several tokens: a prompt, or a chunk (with kv_rows and mask)."""

    tokens: slice  # its tokens in the batch
    kv_rows: torch.Tensor | None = None  # [2 * seq_len] int64, cache rows: keys, then values
    mask: torch.Tensor | None = None  # [query_len, seq_len] float32, 0 or -inf


@dataclass
class CPUAttentionMetadata:
    """What every layer does with this step's batch.

    "Cache rows" count one layer's cache as a matrix [num_blocks * 2 * block_size, num_kv_heads *
    head_size], in which a block is `block_size` rows of keys, then as many of values.
    """

    slot_mapping: torch.Tensor  # [num_tokens] int64, as CommonAttentionMetadata's
    write_rows: torch.Tensor  # [2 * num_tokens] int64, where the batch's keys, then values, go
    decodes: list[DecodeGroup]
    prefills: list[Prefill]


class CPUAttentionBackend(AttentionBackend):
    """The backend "CPU_ATTN"."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return CPUAttentionMetadataBuilder


class CPUAttentionMetadataBuilder(AttentionMetadataBuilder[CPUAttentionMetadata]):
    """Sorts the batch's requests into decode groups, prompts and chunks."""

    def build(self, common_attn_metadata: CommonAttentionMetadata) -> CPUAttentionMetadata:
        slots = common_attn_metadata.slot_mapping
        key_rows = slots + slots // self.block_size * self.block_size
        return CPUAttentionMetadata(
            slot_mapping=slots,
            write_rows=torch.cat([key_rows, key_rows + self.block_size]),
            decodes=self._build_decodes(common_attn_metadata),
            prefills=self._build_prefills(common_attn_metadata),
        )

    def _build_decodes(self, common_attn_metadata: CommonAttentionMetadata) -> list[DecodeGroup]:
        query_start_loc = common_attn_metadata.query_start_loc_cpu.numpy()
        seq_lens = common_attn_metadata.seq_lens_cpu.numpy()
        block_table = common_attn_metadata.block_table_tensor.cpu().numpy()
        reqs = np.flatnonzero(np.diff(query_start_loc) == 1)
        reqs = reqs[np.argsort(seq_lens[reqs], kind="stable")]
        max_group_tokens = MAX_GROUP_ELEMENTS // (2 * self.num_kv_heads * self.head_size)
        return [
            self._build_decode_group(
                query_start_loc[group],
                seq_lens[group],
                block_table[group],
                common_attn_metadata.slot_mapping.device,
            )
            for group in split_decodes(reqs, seq_lens[reqs], max_group_tokens)
        ]

    def _build_prefills(self, common_attn_metadata: CommonAttentionMetadata) -> list[Prefill]:
        query_start_loc = common_attn_metadata.query_start_loc_cpu.numpy()
        block_table = common_attn_metadata.block_table_tensor.cpu().numpy()
        return [
            self._build_prefill(
                slice(int(query_start_loc[req]), int(query_start_loc[req + 1])),
                int(common_attn_metadata.seq_lens_cpu[req]),
                block_table[req],
                common_attn_metadata.slot_mapping.device,
            )
            for req in np.flatnonzero(np.diff(query_start_loc) > 1)
        ]

    def _build_decode_group(
        self,
        token_indices: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        device: torch.device,
    ) -> DecodeGroup:
        positions = np.arange(seq_lens.max())
        is_context = positions < seq_lens[:, None]
        positions = np.where(is_context, positions, 0)
        mask = np.where(is_context, np.float32(0), np.float32(-np.inf))
        return DecodeGroup(
            token_indices=torch.from_numpy(token_indices.astype(np.int64)).to(device),
            kv_rows=self._kv_rows(block_table, positions).to(device),
            mask=torch.from_numpy(mask[:, None, None, :]).to(device),
        )

    def _build_prefill(
        self, tokens: slice, seq_len: int, block_table: np.ndarray, device: torch.device
    ) -> Prefill:
        context_len = seq_len - (tokens.stop - tokens.start)
        if context_len == 0:
            return Prefill(tokens)
        positions = np.arange(seq_len)
        is_visible = positions <= positions[context_len:, None]  # [query_len, seq_len]
        mask = np.where(is_visible, np.float32(0), np.float32(-np.inf))
        kv_rows = self._kv_rows(block_table[None], positions[None])
        return Prefill(tokens, kv_rows.to(device), torch.from_numpy(mask).to(device))

    def _kv_rows(self, block_table: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Cache rows of the keys, then of the values, at `positions` [num_reqs, n]."""
        block_indices, offsets = np.divmod(positions, self.block_size)
        block_ids = np.take_along_axis(block_table, block_indices, axis=1).astype(np.int64)
        key_rows = block_ids * (2 * self.block_size) + offsets
        return torch.from_numpy(np.stack([key_rows, key_rows + self.block_size]).reshape(-1))


def split_decodes(
    reqs: np.ndarray, seq_lens: np.ndarray, max_group_tokens: int
) -> list[np.ndarray]:
    """Cut `reqs`, sorted by their `seq_lens`, where padding or size would get too large."""
    cuts, start, total = [], 0, 0
    for i, seq_len in enumerate(seq_lens.tolist()):
        padded = seq_len * (i + 1 - start)  # the size of the group if it took request i as well
        total += seq_len
        if i > start and (padded - total > MAX_GROUP_PADDING or padded > max_group_tokens):
            cuts.append(i)
            start, total = i, seq_len
    return np.split(reqs, cuts) if len(reqs) else []


class CPUAttentionBackendImpl(AttentionImpl[CPUAttentionMetadata]):
    """One layer."""

    def do_kv_cache_update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata,
    ) -> None:
        # All of the batch is written before any of it is read (see AttentionImpl).
        new_rows = torch.cat([key, value]).view(-1, self.num_kv_heads * self.head_size)
        self._cache_rows(kv_cache).index_copy_(0, attn_metadata.write_rows, new_rows)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        cache_rows = self._cache_rows(kv_cache)
        output = torch.empty_like(query) if output is None else output
        for group in attn_metadata.decodes:
            self._decode(query, cache_rows, group, output)
        for prefill in attn_metadata.prefills:
            self._prefill(query, key, value, cache_rows, prefill, output)
        return output

    def _decode(
        self,
        query: torch.Tensor,
        cache_rows: torch.Tensor,
        group: DecodeGroup,
        output: torch.Tensor,
    ) -> None:
        num_reqs, max_seq_len = group.shape
        kv = cache_rows.index_select(0, group.kv_rows)
        kv = kv.view(2, num_reqs, max_seq_len, self.num_kv_heads, self.head_size)
        k, v = kv.transpose(2, 3)  # [num_reqs, num_kv_heads, max_seq_len, head_size] each
        # The query heads of one key head become that head's query rows.
        q = query.index_select(0, group.token_indices)
        q = q.view(num_reqs, self.num_kv_heads, -1, self.head_size)
        mask = group.mask.to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        out = out.reshape(num_reqs, self.num_heads, self.head_size)
        output.index_copy_(0, group.token_indices, out)

    def _prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache_rows: torch.Tensor,
        prefill: Prefill,
        output: torch.Tensor,
    ) -> None:
        if prefill.kv_rows is None or prefill.mask is None:
            k, v, mask = key[prefill.tokens], value[prefill.tokens], None
        else:
            kv = cache_rows.index_select(0, prefill.kv_rows)
            k, v = kv.view(2, -1, self.num_kv_heads, self.head_size)
            mask = prefill.mask.to(query.dtype)
        out = F.scaled_dot_product_attention(
            self._split_heads(query[prefill.tokens]),
            self._expand_heads(k),
            self._expand_heads(v),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
        )
        self._split_heads(output[prefill.tokens]).copy_(out)

    def _cache_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The cache as the matrix whose rows CPUAttentionMetadata counts, a view."""
        return kv_cache.view(-1, self.num_kv_heads * self.head_size)

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[n, num_heads, head_size] -> [num_kv_heads, group, n, head_size], a view."""
        return x.view(len(x), self.num_kv_heads, -1, self.head_size).permute(1, 2, 0, 3)

    def _expand_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[n, num_kv_heads, head_size] -> [num_kv_heads, group, n, head_size], a view."""
        group = self.num_heads // self.num_kv_heads
        return x.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
