"""The CPU attention backend against dense attention in float64; ragged batches, poisoned caches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.v1.attention.backends import cpu_attn
from nanovllm.v1.attention.backends.cpu_attn import split_decodes
from tests.v1.attention.batches import MIXED, Batch, Shape, share_first_block

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
    nothing was written: no padding, stale table entry or foreign block reaches a result. After the
    step the cache holds contexts and new tokens, and is untouched elsewhere."""
    Batch(requests, Shape(block_size, num_kv_heads, group, head_size), seed).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [16, 80, 128, 256])
def test_a_mixed_batch_is_right_in_every_dtype_and_head_size(dtype, head_size):
    """float32, bfloat16 and float16, head sizes 16 to 256."""
    Batch(MIXED, Shape(head_size=head_size, group=2, dtype=dtype)).check()


def test_a_request_reads_what_another_writes_in_the_same_step():
    """Two identical prompts in one batch, the second with a prefix-cache hit on the first."""
    batch = Batch([(8, 0), (1, 7)], Shape(block_size=4))
    share_first_block(batch)
    batch.check()


def test_a_row_s_result_does_not_depend_on_its_neighbours():
    """A decoding request gets the same output alone and padded inside a group, to rounding."""
    alone = Batch([(1, 9)], Shape(group=3))
    outputs = alone.run(scale=0.25)
    together = Batch([(1, 9), (1, 100), (1, 30)], Shape(group=3))
    together.q[0], together.k[0], together.v[0] = alone.q[0], alone.k[0], alone.v[0]
    blocks, offsets = np.divmod(together.slots(0, 0, 9), 16)
    together.kv_cache[blocks, 0, offsets] = alone.k[0][:9].float()
    together.kv_cache[blocks, 1, offsets] = alone.v[0][:9].float()
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
