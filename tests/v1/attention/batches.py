"""Random ragged batches over a poisoned paged cache, and what attention to them must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanovllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from nanovllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

# Of norm(difference) / norm(expected).
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Requests = list[tuple[int, int]]  # (query_len, context_len before it) each
MIXED: Requests = [(1, 0), (17, 0), (1, 33), (5, 20), (1, 7), (2, 0), (16, 16), (1, 15), (1, 16)]


@dataclass
class Shape:
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 1
    head_size: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    padding: int = 0  # rows of no tokens after the requests, and as many tokens of no slot

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


class Batch:
    """A random batch.

    Every request's keys and values lie in `self.k[i]`, `self.v[i]` (float64, the truth). Those of
    its context are in the paged cache, in blocks dealt out at random; everything else in the cache,
    the rest of the last block and the null block included, is NaN. So are the tokens that pad.
    """

    def __init__(self, requests: Requests, shape: Shape, seed: int = 0) -> None:
        self.requests, self.shape = requests, shape
        self.rng = np.random.default_rng(seed)
        num_blocks = [-(-sum(request) // shape.block_size) for request in requests]
        total = sum(num_blocks)
        order = self.rng.permutation(total) + 1
        starts = np.cumsum([0, *num_blocks])
        # Entries past a row's end name a block that is in nobody's table.
        table_shape = (len(requests) + shape.padding, max(num_blocks))
        self.block_table = np.full(table_shape, total + 1, dtype=np.int32)
        for row, n in enumerate(num_blocks):
            self.block_table[row, :n] = order[starts[row] : starts[row] + n]

        cache_shape = CPUAttentionBackend.get_kv_cache_shape(
            total + 2, shape.block_size, shape.num_kv_heads, shape.head_size
        )
        kv_cache = torch.full(cache_shape, float("nan"), dtype=shape.dtype)
        self.q = [self._random(query, shape.num_heads) for query, _ in requests]
        self.k = [self._random(sum(request), shape.num_kv_heads) for request in requests]
        self.v = [self._random(sum(request), shape.num_kv_heads) for request in requests]
        for row, (_, context) in enumerate(requests):
            blocks, offsets = np.divmod(self.slots(row, 0, context), shape.block_size)
            kv_cache[blocks, 0, offsets] = self.k[row][:context].to(shape.dtype)
            kv_cache[blocks, 1, offsets] = self.v[row][:context].to(shape.dtype)
        self.kv_cache = kv_cache.to(shape.device)

    def _random(self, length: int, num_heads: int) -> torch.Tensor:
        """Random numbers that the batch's dtype represents exactly."""
        numbers = self.rng.standard_normal((length, num_heads, self.shape.head_size))
        return torch.from_numpy(numbers).to(self.shape.dtype).double()

    def slots(self, row: int, start: int, end: int) -> np.ndarray:
        """Where positions start..end-1 of a request are in the cache."""
        block_indices, offsets = np.divmod(np.arange(start, end), self.shape.block_size)
        return (
            self.block_table[row, block_indices].astype(np.int64) * self.shape.block_size + offsets
        )

    def metadata(self) -> CommonAttentionMetadata:
        padding, device = self.shape.padding, self.shape.device
        query_lens = np.array([query for query, _ in self.requests] + [0] * padding)
        seq_lens = np.array([sum(request) for request in self.requests] + [0] * padding)
        query_start_loc = torch.from_numpy(np.cumsum([0, *query_lens]).astype(np.int32))
        seq_lens_cpu = torch.from_numpy(seq_lens.astype(np.int32))
        slots = [
            self.slots(row, context, context + query)
            for row, (query, context) in enumerate(self.requests)
        ]
        slot_mapping = np.concatenate([*slots, np.full(padding, -1)])
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc.to(device),
            query_start_loc_cpu=query_start_loc,
            seq_lens=seq_lens_cpu.to(device),
            seq_lens_cpu=seq_lens_cpu,
            num_reqs=len(seq_lens),
            num_actual_tokens=len(slot_mapping),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=torch.from_numpy(self.block_table).to(device),
            slot_mapping=torch.from_numpy(slot_mapping).to(device),
        )

    def qkv(self) -> tuple[torch.Tensor, ...]:
        """The step's queries, keys and values as a model gives them: slices of one projection's
        output, so not contiguous."""
        shape = self.shape
        new = [
            torch.cat([self.q[row], self.k[row][context:], self.v[row][context:]], dim=1)
            for row, (_, context) in enumerate(self.requests)
        ]
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        padding = torch.full((shape.padding, sum(heads), shape.head_size), float("nan"))
        return torch.cat([*new, padding]).to(shape.device, shape.dtype).split(heads, dim=1)

    def run(
        self,
        scale: float,
        backend: type[AttentionBackend] = CPUAttentionBackend,
        prepare: Callable[[Any], None] = lambda builder: None,
    ) -> torch.Tensor:
        """The backend's output for the requests' tokens, [num_tokens, num_heads, head_size].

        `prepare` may change the metadata builder.
        """
        shape = self.shape
        builder = backend.get_builder_cls()(
            shape.block_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_size,
            device=torch.device(shape.device),
            dtype=shape.dtype,
        )
        prepare(builder)
        impl = backend.get_impl_cls()(shape.num_heads, shape.head_size, scale, shape.num_kv_heads)
        query, key, value = self.qkv()
        output = torch.full(query.shape, float("nan"), dtype=shape.dtype, device=shape.device)
        attn_metadata = builder.build(self.metadata())
        impl.do_kv_cache_update(key, value, self.kv_cache, attn_metadata)
        result = impl.forward(query, key, value, self.kv_cache, attn_metadata, output)
        assert result is output
        return output[: len(output) - shape.padding].cpu()

    def expected(self, scale: float) -> torch.Tensor:
        """Dense causal attention, one request after the other, in float64."""
        outputs = []
        for row, (query, context) in enumerate(self.requests):
            k = self.k[row].repeat_interleave(self.shape.group, dim=1)
            v = self.v[row].repeat_interleave(self.shape.group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", self.q[row], k) * scale
            hidden = torch.arange(query + context) > torch.arange(context, context + query)[:, None]
            weights = scores.masked_fill(hidden, -float("inf")).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outputs)

    def check(
        self,
        backend: type[AttentionBackend] = CPUAttentionBackend,
        prepare: Callable[[Any], None] = lambda builder: None,
    ) -> None:
        """Attention and, after it, the cache are right for every token. A NaN anywhere fails."""
        scale = self.shape.head_size**-0.5
        num_unwritten = int(self.kv_cache.isnan().sum())
        output = self.run(scale, backend, prepare).double()
        start = 0
        for row, expected in enumerate(self.expected(scale).split([q for q, _ in self.requests])):
            difference = output[start : start + len(expected)] - expected
            error = float(difference.norm() / expected.norm())
            assert error < TOLERANCE[self.shape.dtype], f"request {row}: {error}"
            start += len(expected)
        self._check_cache(num_unwritten)

    def _check_cache(self, num_unwritten: int) -> None:
        """It holds contexts and new tokens, and is as it was everywhere else."""
        kv_cache = self.kv_cache.cpu()
        for row, request in enumerate(self.requests):
            blocks, offsets = np.divmod(self.slots(row, 0, sum(request)), self.shape.block_size)
            assert torch.equal(kv_cache[blocks, 0, offsets].double(), self.k[row])
            assert torch.equal(kv_cache[blocks, 1, offsets].double(), self.v[row])
        token = 2 * self.shape.num_kv_heads * self.shape.head_size
        num_new = sum(query for query, _ in self.requests)
        assert int(kv_cache.isnan().sum()) == num_unwritten - num_new * token


def share_first_block(batch: Batch) -> None:
    """Make of a batch [(8, 0), (1, 7)] with blocks of 4 two identical prompts in one step.

    The second has hit the first's block of positions 0-3, published before it is filled, and
    computes only its last token: it must see keys that this very step writes.
    """
    assert batch.requests == [(8, 0), (1, 7)] and batch.shape.block_size == 4
    batch.k[1], batch.v[1] = batch.k[0].clone(), batch.v[0].clone()
    batch.kv_cache[int(batch.block_table[1, 0])] = float("nan")
    batch.block_table[1, 0] = batch.block_table[0, 0]
    own_block = int(batch.block_table[1, 1])
    dtype = batch.shape.dtype
    batch.kv_cache[own_block, 0, :3] = batch.k[1][4:7].to(batch.kv_cache.device, dtype)
    batch.kv_cache[own_block, 1, :3] = batch.v[1][4:7].to(batch.kv_cache.device, dtype)
