"""The Triton attention backend against dense attention in float64.

On the CPU Triton interprets the kernels, in float32. On a GPU (-m gpu) they are compiled, for
larger batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.v1.attention.backends import triton_attn
from nanovllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionMetadataBuilder,
    get_query_blocks,
)
from nanovllm.v1.attention.ops.triton_reshape_and_cache_flash import reshape_and_cache_flash
from nanovllm.v1.attention.ops.triton_unified_attention import get_decode_config
from tests.v1.attention.batches import MIXED, Batch, Requests, Shape, share_first_block

pytest.importorskip("triton")

on_every_device = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, id="interpreted"),
        pytest.param("cuda", torch.float32, id="cuda-float32", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, id="cuda-float16", marks=pytest.mark.gpu),
    ],
)


def check(batch: Batch, num_sms: int = 1, dense_multiple: int | None = None) -> None:
    """With scratch memory full of NaN, on a device of `num_sms` multiprocessors."""

    def prepare(builder: TritonAttentionMetadataBuilder) -> None:
        builder.num_sms, builder.dense_multiple = num_sms, dense_multiple
        builder.segments = builder._allocate_segments(len(batch.block_table))
        for scratch in ("segm_output", "segm_max", "segm_expsum"):
            getattr(builder.segments, scratch).fill_(float("nan"))

    batch.check(TritonAttentionBackend, prepare)


def enlarged(requests: Requests, device: str) -> Requests:
    """On a GPU, four of each and with longer contexts."""
    if device == "cpu":
        return requests
    return [(query, 9 * context) for query, context in 4 * requests]


# Block sizes with several, one and a part of a tile of tokens; every ratio of query to key heads.
SHAPES = [
    # block_size, group, head_size
    (1, 5, 64),
    (4, 2, 24),
    (16, 1, 64),
    (16, 2, 128),
    (32, 3, 80),
    (48, 7, 16),
    (64, 4, 96),
    (128, 6, 64),
    (256, 8, 256),
]


@on_every_device
@pytest.mark.parametrize(("block_size", "group", "head_size"), SHAPES)
def test_a_mixed_batch_attends_like_dense_attention(device, dtype, block_size, group, head_size):
    """Prompts, chunks and decode rows side by side, NaN wherever nothing was written."""
    shape = Shape(block_size, 2, group, head_size, dtype, device)
    check(Batch(enlarged(MIXED, device), shape))


@on_every_device
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_any_number_of_key_heads(device, dtype, num_kv_heads):
    """The cache's rows need not be a power of two wide."""
    shape = Shape(16, num_kv_heads, 2, 40, dtype, device)
    check(Batch(enlarged([(1, 20), (9, 3)], device), shape))


@given(
    st.lists(
        st.tuples(
            st.one_of(st.just(1), st.integers(1, 40)), st.one_of(st.just(0), st.integers(0, 70))
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from([None, 4, 16]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=12, deadline=None)
def test_any_ragged_batch(requests, block_size, group, num_sms, dense_multiple, seed):
    """Any mix, cut into segments and dense prompts anywhere."""
    check(Batch(requests, Shape(block_size, 1, group), seed), num_sms, dense_multiple)


@on_every_device
@pytest.mark.parametrize("num_sms", [1, 2, 8])
def test_long_contexts_are_summed_up_from_segments(device, dtype, num_sms):
    """Up to 32 segments, of which short contexts fill one or none; one request is no decode row."""
    requests = [(1, 420), (1, 0), (3, 40), (1, 31), (1, 32), (1, 300)]
    check(Batch(enlarged(requests, device), Shape(16, 1, 2, 64, dtype, device)), num_sms)


@on_every_device
def test_the_scratch_of_segments_can_be_used_again(device, dtype):
    """What one layer leaves there does not reach the next, whatever its contexts are."""
    builders = []

    def prepare(builder: TritonAttentionMetadataBuilder) -> None:
        builder.num_sms = 4
        if not builders:
            builder.segments = builder._allocate_segments(3)
            builders.append(builder)
        builder.segments = builders[0].segments

    shape = Shape(16, 2, 3, 16, dtype, device)
    for requests in ([(1, 200), (1, 90), (1, 3)], [(1, 30), (1, 250)], [(1, 40), (1, 1), (1, 100)]):
        Batch(requests, shape).check(TritonAttentionBackend, prepare)
        assert not builders[0].segments.segm_arrivals.any()


@on_every_device
@pytest.mark.parametrize("num_sms", [1, 8])
def test_rows_that_pad_a_batch_do_no_harm(device, dtype, num_sms):
    """Requests without tokens and tokens without slots, full of NaN."""
    shape = Shape(16, 2, 2, 64, dtype, device, padding=3)
    check(Batch(enlarged([(1, 60), (1, 100), (1, 0)], device), shape), num_sms)
    check(Batch(enlarged(MIXED, device), shape), num_sms)


@on_every_device
def test_a_request_reads_what_another_writes_in_the_same_step(device, dtype):
    """Two identical prompts in one batch, the second with a prefix-cache hit on the first."""
    batch = Batch([(8, 0), (1, 7)], Shape(block_size=4, dtype=dtype, device=device))
    share_first_block(batch)
    check(batch)


@on_every_device
def test_dense_attention_takes_multiples_of_prompts_and_pages_the_rest(device, dtype):
    """Whole prompts, with and without a rest; chunks and decode rows are none."""
    requests = [(16, 0), (23, 0), (1, 0), (7, 0), (1, 9), (16, 8)]
    if dtype == torch.float32 and device == "cuda":
        pytest.skip("cuDNN's attention has no float32")
    check(Batch(requests, Shape(16, 2, 2, 64, dtype, device)), dense_multiple=8)


def test_sums_instead_of_products_give_the_same(monkeypatch):
    """DecodeConfig.use_dot=False."""
    monkeypatch.setattr(
        triton_attn,
        "get_decode_config",
        lambda *args: replace(get_decode_config(*args), use_dot=False, tile=16),
    )
    for group in (1, 2, 3):
        check(Batch([(1, 40), (1, 7), (1, 70)], Shape(group=group)), num_sms=4)


@on_every_device
def test_metadata_for_a_graph_serves_any_lengths(device, dtype):
    """Built for empty rows, whose tensors are then filled for a batch; replayed on a GPU."""
    shape = Shape(16, 2, 2, 64, dtype, device, padding=1)
    batch = Batch([(1, 70), (1, 130), (1, 3)], shape)
    metadata, (query, key, value) = batch.metadata(), batch.qkv()
    builder = TritonAttentionMetadataBuilder(
        16, shape.num_heads, 2, 64, max_num_reqs=4, dtype=dtype,
        device=torch.device(device),
    )  # fmt: skip
    builder.num_sms = 8
    builder.segments = builder._allocate_segments(4)
    impl = TritonAttentionBackend.get_impl_cls()(shape.num_heads, 64, 0.125, 2)
    output = torch.full(query.shape, float("nan"), dtype=dtype, device=device)

    empty = replace(
        metadata,
        query_start_loc=torch.zeros_like(metadata.query_start_loc),
        seq_lens=torch.zeros_like(metadata.seq_lens),
        slot_mapping=torch.full_like(metadata.slot_mapping, -1),
        max_query_len=1,
        max_seq_len=256,
    )
    attn_metadata = builder.build_for_cudagraph_capture(empty)

    def layer() -> None:
        impl.do_kv_cache_update(key, value, batch.kv_cache, attn_metadata)
        impl.forward(query, key, value, batch.kv_cache, attn_metadata, output)

    replay: Callable[[], None] = layer
    layer()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer()
        replay = graph.replay
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        getattr(empty, name).copy_(getattr(metadata, name))
    builder.prepare_for_replay(metadata)
    started = metadata.seq_lens_cpu.numpy()[builder.req_order.np[: metadata.num_reqs]]
    assert (np.diff(started) <= 0).all(), "the longest context starts first"
    replay()
    expected = batch.expected(0.125)
    difference = output[:3].cpu().double() - expected
    assert difference.norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 1e-2)


def test_query_blocks_cover_the_tokens_once_and_the_longest_come_first():
    """Blocks begin at multiples of their size from each request's first token."""
    first, num_tokens = np.array([0, 0, 8, 0, 0]), np.array([9, 0, 5, 4, 1])
    context = np.array([0, 7, 0, 30, 2])
    blocks = get_query_blocks(first, num_tokens, context, block_q=4)
    assert blocks.dtype == np.int32
    assert blocks.tolist() == [[3, 0], [2, 12], [0, 8], [2, 8], [0, 4], [4, 0], [0, 0]]


@on_every_device
def test_keys_and_values_go_to_their_slots(device, dtype):
    """Strided views of a projection; negative slots and tokens past the slots' end are skipped."""
    num_kv_heads, head_size, block_size = 3, 40, 5
    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(7, 9, head_size, generator=generator).to(device, dtype)
    key, value = projected[:, 3:6], projected[:, 6:]
    kv_cache = torch.full((4, 2, block_size, num_kv_heads, head_size), float("nan"))
    kv_cache = kv_cache.to(device, dtype)
    expected = kv_cache.clone()
    slots = [11, -1, 0, 19, -1, 4]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // block_size, 0, slot % block_size] = key[token]
            expected[slot // block_size, 1, slot % block_size] = value[token]
    reshape_and_cache_flash(key, value, kv_cache, torch.tensor(slots, device=device))
    torch.testing.assert_close(kv_cache, expected, rtol=0, atol=0, equal_nan=True)


def test_where_the_backend_cannot_run():
    """Each reason by itself; on a CPU only the interpreter will do, in float32."""
    validate = TritonAttentionBackend.validate_configuration
    assert validate("cuda", 128, torch.bfloat16, 16) == []
    assert validate("cpu", 64, torch.float32, 16) == []  # these tests interpret
    (reason,) = validate("cpu", 64, torch.bfloat16, 16)
    assert "float32" in reason
    (reason,) = validate("cuda", 512, torch.bfloat16, 16)
    assert "512" in reason
    (reason,) = validate("mps", 128, torch.float32, 16)
    assert "mps" in reason
    (reason,) = validate("cuda", 128, torch.float64, 16)
    assert "float64" in reason
