"""The CPU attention backend against dense attention in float64; ragged batches, poisoned caches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.v1.attention.backend import CommonAttentionMetadata
from nanovllm.v1.attention.backends import cpu_attn
from nanovllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, split_decodes

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Shape:
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 1
    head_size: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


class Batch:
    """A random batch: `requests` are (query_len, context_len before it) pairs.

    Every request's keys and values lie in `self.k[i]`, `self.v[i]` (float64, the truth). Those of
    its context are in the paged cache, in blocks dealt out at random; everything else in the cache,
    the rest of the last block and the null block included, is NaN.
    """

    def __init__(self, requests: list[tuple[int, int]], shape: Shape, seed: int = 0) -> None:
        self.requests, self.shape = requests, shape
        self.rng = np.random.default_rng(seed)
        num_blocks = [-(-(query + context) // shape.block_size) for query, context in requests]
        total = sum(num_blocks)
        order = self.rng.permutation(total) + 1
        starts = np.cumsum([0, *num_blocks])
        # Entries past a row's end name a block that is in nobody's table.
        self.block_table = np.full((len(requests), max(num_blocks) + 2), total + 1, dtype=np.int32)
        for row, n in enumerate(num_blocks):
            self.block_table[row, :n] = order[starts[row] : starts[row] + n]

        cache_shape = CPUAttentionBackend.get_kv_cache_shape(
            total + 2, shape.block_size, shape.num_kv_heads, shape.head_size
        )
        self.kv_cache = torch.full(cache_shape, float("nan"), dtype=shape.dtype)
        self.q = [self._random(query, shape.num_heads) for query, _ in requests]
        self.k = [self._random(sum(request), shape.num_kv_heads) for request in requests]
        self.v = [self._random(sum(request), shape.num_kv_heads) for request in requests]
        for row, (_, context) in enumerate(requests):
            for position in range(context):
                block, offset = divmod(self.slot(row, position), shape.block_size)
                self.kv_cache[block, 0, offset] = self.k[row][position].to(shape.dtype)
                self.kv_cache[block, 1, offset] = self.v[row][position].to(shape.dtype)

    def _random(self, length: int, num_heads: int) -> torch.Tensor:
        """Random numbers that the batch's dtype represents exactly."""
        numbers = self.rng.standard_normal((length, num_heads, self.shape.head_size))
        return torch.from_numpy(numbers).to(self.shape.dtype).double()

    def slot(self, row: int, position: int) -> int:
        block_index, offset = divmod(position, self.shape.block_size)
        return int(self.block_table[row, block_index]) * self.shape.block_size + offset

    def metadata(self) -> CommonAttentionMetadata:
        query_lens = torch.tensor([query for query, _ in self.requests])
        query_start_loc = torch.cat([torch.zeros(1), query_lens.cumsum(0)]).to(torch.int32)
        seq_lens = torch.tensor([sum(request) for request in self.requests], dtype=torch.int32)
        slots = [
            self.slot(row, context + i)
            for row, (query, context) in enumerate(self.requests)
            for i in range(query)
        ]
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            num_reqs=len(self.requests),
            num_actual_tokens=len(slots),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=torch.from_numpy(self.block_table),
            slot_mapping=torch.tensor(slots),
        )

    def run(self, scale: float) -> torch.Tensor:
        """The backend's output, [num_tokens, num_heads, head_size]."""
        shape = self.shape
        builder = CPUAttentionBackend.get_builder_cls()(
            shape.block_size, shape.num_heads, shape.num_kv_heads, shape.head_size
        )
        impl = CPUAttentionBackend.get_impl_cls()(
            shape.num_heads, shape.head_size, scale, shape.num_kv_heads
        )
        # As the models give them: slices of one projection, so not contiguous.
        new = [
            torch.cat([self.q[row], self.k[row][context:], self.v[row][context:]], dim=1)
            for row, (_, context) in enumerate(self.requests)
        ]
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        q, k, v = torch.cat(new).to(shape.dtype).split(heads, dim=1)
        return impl.forward(q, k, v, self.kv_cache, builder.build(self.metadata()))

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

    def check(self) -> None:
        scale = self.shape.head_size**-0.5
        difference = (self.run(scale).double() - self.expected(scale)).abs()
        assert difference.max() < TOLERANCE[self.shape.dtype]  # a NaN fails, too


requests = st.lists(
    st.tuples(st.one_of(st.just(1), st.integers(1, 40)), st.one_of(st.just(0), st.integers(0, 70))),
    min_size=1,
    max_size=8,
)


@given(
    requests,
    st.integers(1, 32),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 8),
    st.sampled_from([16, 24, 64]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_any_ragged_batch_attends_like_dense_attention(
    requests, block_size, num_kv_heads, group, head_size, seed
):
    """Prompts, chunks and decodes in any mix equal dense causal attention, with NaN wherever
    nothing was
    written: no padding, stale table entry or foreign block reaches a result."""
    Batch(requests, Shape(block_size, num_kv_heads, group, head_size), seed).check()


MIXED = [(1, 0), (17, 0), (1, 33), (5, 20), (1, 7), (2, 0), (16, 16), (1, 15), (1, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [16, 80, 128, 256])
def test_a_mixed_batch_is_right_in_every_dtype_and_head_size(dtype, head_size):
    """float32, bfloat16 and float16, head sizes 16 to 256."""
    Batch(MIXED, Shape(head_size=head_size, group=2, dtype=dtype)).check()


def test_a_request_reads_what_another_writes_in_the_same_step():
    """Two identical prompts in one batch: the second has hit the first's blocks, published before
    they are filled, and computes only its last token. It must see keys that this very step
    writes."""
    shape = Shape(block_size=4)
    batch = Batch([(8, 0), (1, 7)], shape)
    batch.k[1], batch.v[1] = batch.k[0].clone(), batch.v[0].clone()
    batch.block_table[1, 0] = batch.block_table[0, 0]  # shared: positions 0-3
    own_block = int(batch.block_table[1, 1])
    batch.kv_cache[own_block, 0, :3] = batch.k[1][4:7].float()
    batch.kv_cache[own_block, 1, :3] = batch.v[1][4:7].float()
    batch.kv_cache[int(batch.block_table[0, 0])] = float("nan")
    batch.check()


def test_every_new_key_and_value_is_in_its_slot_after_the_step():
    """After forward the cache holds context and new tokens, and still NaN everywhere else."""
    batch = Batch(MIXED, Shape(block_size=4))
    before = batch.kv_cache.isnan().sum()
    batch.run(scale=1.0)
    num_new = sum(query for query, _ in MIXED)
    elements = 2 * batch.shape.num_kv_heads * batch.shape.head_size
    assert before - batch.kv_cache.isnan().sum() == num_new * elements
    for row, (query, context) in enumerate(MIXED):
        for position in range(query + context):
            block, offset = divmod(batch.slot(row, position), 4)
            assert torch.equal(batch.kv_cache[block, 0, offset].double(), batch.k[row][position])
            assert torch.equal(batch.kv_cache[block, 1, offset].double(), batch.v[row][position])


def test_a_row_s_result_does_not_depend_on_its_neighbours():
    """A decoding request gets the same output alone and padded inside a group, to rounding."""
    alone = Batch([(1, 9)], Shape(group=3))
    outputs = alone.run(scale=0.25)
    together = Batch([(1, 9), (1, 100), (1, 30)], Shape(group=3))
    together.q[0], together.k[0], together.v[0] = alone.q[0], alone.k[0], alone.v[0]
    for position in range(9):
        block, offset = divmod(together.slot(0, position), 16)
        together.kv_cache[block, 0, offset] = alone.k[0][position].float()
        together.kv_cache[block, 1, offset] = alone.v[0][position].float()
    torch.testing.assert_close(together.run(scale=0.25)[:1], outputs, rtol=0, atol=1e-6)


@given(st.lists(st.integers(1, 3000), max_size=40), st.integers(1, 5000))
def test_decode_groups_are_a_partition_within_both_limits(seq_lens, max_group_tokens):
    """Every request is in one group, in order; groups of several obey padding and size limits."""
    lengths = np.sort(np.array(seq_lens, dtype=np.int64))
    groups = split_decodes(np.arange(len(lengths)), lengths, max_group_tokens)
    assert [int(req) for group in groups for req in group] == list(range(len(lengths)))
    for group in groups:
        padded = int(lengths[group].max()) * len(group)
        assert len(group) == 1 or padded <= max_group_tokens
        assert padded - int(lengths[group].sum()) <= cpu_attn.MAX_GROUP_PADDING


def test_requests_of_similar_length_share_a_group():
    """32 contexts of 100 tokens are one call, not 32."""
    assert len(split_decodes(np.arange(32), np.full(32, 100), 4096)) == 1


def test_groups_are_cut_when_batches_are_large(monkeypatch):
    """With limits so small that every request is its own group the results are the same."""
    monkeypatch.setattr(cpu_attn, "MAX_GROUP_ELEMENTS", 1)
    Batch(MIXED, Shape(group=4)).check()
