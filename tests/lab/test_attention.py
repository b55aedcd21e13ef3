"""FlashAttention and paged decode: kernels against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.lab import flash_attention as flash
from nanovllm.lab import paged_decode as paged
from nanovllm.lab.flash_attention import FlashAttentionConfig, attention_reference, flash_attention
from nanovllm.lab.paged_decode import (
    PagedDecodeConfig,
    merge_attn_states,
    paged_decode,
    paged_decode_reference,
)
from tests.lab.support import DEVICES, assert_close, randn

SMALL = FlashAttentionConfig(16, 16, 4, 1)

# batch, num_queries, num_keys, num_heads, num_kv_heads, head_size
SHAPES = [
    (1, 1, 1, 1, 1, 16),
    (2, 33, 33, 2, 2, 32),
    (1, 16, 64, 4, 2, 16),
    (1, 5, 50, 6, 2, 20),
    (2, 40, 17, 2, 1, 16),  # more queries than keys: causal, 23 of them see nothing
]
GPU_SHAPES = [
    (1, 512, 512, 4, 2, 64),
    (2, 300, 1001, 8, 2, 128),
    (1, 257, 257, 3, 3, 96),
    (1, 200, 333, 2, 1, 256),
]


def qkv(
    batch: int, num_queries: int, num_keys: int, heads: int, kv_heads: int, head_size: int, **kw
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        randn(batch, num_queries, heads, head_size, **kw),
        randn(batch, num_keys, kv_heads, head_size, seed=1, **kw),
        randn(batch, num_keys, kv_heads, head_size, seed=2, **kw),
    )


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES)
def test_flash_attention(
    shape: tuple[int, ...], causal: bool, device: str, dtype: torch.dtype
) -> None:
    """Sizes that fill no tile, fewer and more queries than keys, heads that share keys."""
    q, k, v = qkv(*shape, device=device, dtype=dtype)
    out = torch.full_like(q, float("nan"))
    assert flash_attention(q, k, v, causal, out=out, config=SMALL) is out
    assert_close(out, attention_reference(q.double(), k.double(), v.double(), causal))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_flash_attention_as_configured(
    shape: tuple[int, ...], causal: bool, dtype: torch.dtype
) -> None:
    """With the tiles that are chosen for the GPU, at the models' head sizes."""
    q, k, v = qkv(*shape, device="cuda", dtype=dtype)
    out = torch.full_like(q, float("nan"))
    flash_attention(q, k, v, causal, out=out)
    assert_close(out, attention_reference(q.double(), k.double(), v.double(), causal))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_queries_that_see_no_key_get_zeros(device: str, dtype: torch.dtype) -> None:
    """40 queries and 17 keys: the first 23 stand before the first key."""
    q, k, v = qkv(1, 40, 17, 2, 1, 16, device=device, dtype=dtype)
    out = flash_attention(q, k, v, config=SMALL)
    assert (out[:, :23] == 0).all()
    assert (out[:, 23:] != 0).any(dim=-1).all()


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_strided_inputs_and_a_given_scale(device: str, dtype: torch.dtype) -> None:
    """q, k and v as slices of one projection, and heads before tokens, as other layouts have it.
    Scores in the thousands do not overflow."""
    packed = randn(2, 20, 3, 2, 16, device=device, dtype=dtype)
    q, k, v = packed.unbind(2)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    out = flash_attention(q, k, v, scale=40.0, config=SMALL)
    expected = attention_reference(q.double(), k.double(), v.double(), scale=40.0)
    error = (out.double() - expected).norm() / expected.norm()
    # Scores of 1000 have an absolute error of 1e-4 in float32, and exp makes it a relative one.
    assert error < (1e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_nothing_beside_the_output_is_written(device: str, dtype: torch.dtype) -> None:
    """Tiles hang over the last query and the head size; their surplus stays in the program."""
    q, k, v = qkv(1, 19, 19, 3, 1, 20, device=device, dtype=dtype)
    memory = torch.full((3, 19, 3, 20), 7.0, device=device, dtype=dtype)
    flash_attention(q, k, v, out=memory[1:2], config=SMALL)
    assert_close(memory[1:2], attention_reference(q.double(), k.double(), v.double()))
    assert (memory[::2] == 7).all()
    cache, tables, lens = make_cache([19], 16, 1, 20, device, dtype)
    for splits in (1, 3):
        memory[0] = 7.0
        config = PagedDecodeConfig(16, splits, 4, 1)
        paged_decode(q[:, -1], cache, tables, lens, out=memory[0, 9:10], config=config)
        assert (memory[0, :9] == 7).all() and (memory[0, 10:] == 7).all()
        assert (memory[0, 9] != 7).all()


def test_what_does_not_fit_is_refused() -> None:
    """In a sentence, before anything is launched."""
    q, k, v = qkv(1, 4, 4, 4, 2, 16, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        flash_attention(q, k, v[:, :3])
    with pytest.raises(ValueError, match="divide"):
        flash_attention(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="contiguous"):
        flash_attention(q.transpose(1, 3), k, v)
    with pytest.raises(ValueError, match="same"):
        flash_attention(q.bfloat16(), k, v)
    with pytest.raises(ValueError, match="positive"):
        flash_attention(q, k, v, scale=-1.0)
    with pytest.raises(ValueError, match="at most 256"):
        flash_attention(*qkv(1, 4, 4, 1, 1, 257, device="cpu", dtype=torch.float32))
    cache, tables = torch.zeros(3, 2, 4, 2, 16), torch.zeros(1, 2, dtype=torch.int32)
    lens = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit"):
        paged_decode(torch.zeros(1, 3, 16), cache, tables, lens)
    with pytest.raises(ValueError, match="one row for each"):
        paged_decode(torch.zeros(2, 4, 16), cache, tables, lens)
    with pytest.raises(ValueError, match="same"):
        paged_decode(torch.zeros(1, 4, 16).bfloat16(), cache, tables, lens)


def make_cache(
    seq_lens: list[int], block_size: int, kv_heads: int, head_size: int, device: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Blocks in random order; NaN in every slot that no sequence owns, -1 in the tables' rest."""
    needed = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(5)) + 1
    cache = torch.full((num_blocks, 2, block_size, kv_heads, head_size), float("nan"))
    tables = torch.full((len(seq_lens), max(needed) + 1), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(6)
    for i, (n, blocks) in enumerate(zip(seq_lens, needed, strict=True)):
        tables[i, :blocks] = order[:blocks]
        for position in range(n):
            slot = cache[order[position // block_size], :, position % block_size]
            slot.copy_(torch.randn(slot.shape, generator=generator))
        order = order[blocks:]
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return cache.to(device=device, dtype=dtype), tables.to(device), lens


# seq_lens, block_size, num_heads, num_kv_heads, head_size
DECODE_SHAPES = [
    ([1], 16, 1, 1, 16),
    ([37, 1, 0, 64], 16, 4, 2, 16),
    ([50, 129], 8, 6, 2, 20),
    ([70], 5, 3, 1, 32),
]
GPU_DECODE_SHAPES = [
    ([1096, 3, 777, 0], 16, 16, 8, 128),
    ([5000], 256, 32, 4, 64),
    ([300, 2049], 16, 9, 3, 96),
]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("num_splits", [1, 2, 9])
@pytest.mark.parametrize("shape", DECODE_SHAPES)
def test_paged_decode(
    shape: tuple[list[int], int, int, int, int], num_splits: int, device: str, dtype: torch.dtype
) -> None:
    """Odd lengths, an empty sequence, more splits than tiles, tiles across several blocks."""
    seq_lens, block_size, heads, kv_heads, head_size = shape
    cache, tables, lens = make_cache(seq_lens, block_size, kv_heads, head_size, device, dtype)
    q = randn(len(seq_lens), heads, head_size, device=device, dtype=dtype)
    out = torch.full_like(q, float("nan"))
    config = PagedDecodeConfig(16, num_splits, 4, 1)
    assert paged_decode(q, cache, tables, lens, out=out, config=config) is out
    assert_close(out, paged_decode_reference(q.double(), cache.double(), tables, lens))
    assert (out[lens == 0] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", GPU_DECODE_SHAPES)
def test_paged_decode_as_configured(
    shape: tuple[list[int], int, int, int, int], dtype: torch.dtype
) -> None:
    """With the tiles and splits that are chosen for the GPU, at the models' head sizes."""
    seq_lens, block_size, heads, kv_heads, head_size = shape
    cache, tables, lens = make_cache(seq_lens, block_size, kv_heads, head_size, "cuda", dtype)
    q = randn(len(seq_lens), heads, head_size, device="cuda", dtype=dtype)
    out = torch.full_like(q, float("nan"))
    paged_decode(q, cache, tables, lens, out=out)
    assert_close(out, paged_decode_reference(q.double(), cache.double(), tables, lens))


def test_decode_is_the_last_row_of_flash_attention() -> None:
    """The same keys in pages and in a row, on the CPU."""
    cache, tables, lens = make_cache([45], 16, 2, 16, "cpu", torch.float32)
    q = randn(1, 45, 4, 16, device="cpu", dtype=torch.float32)
    k, v = cache[tables[0, :3].long()].transpose(0, 1).flatten(1, 2)[:, None, :45]
    whole = flash_attention(q, k, v, config=SMALL)
    last = paged_decode(q[:, -1], cache, tables, lens, config=PagedDecodeConfig(16, 2, 4, 1))
    torch.testing.assert_close(last, whole[:, -1], rtol=1e-5, atol=1e-6)


def test_chosen_configurations() -> None:
    """Shared memory holds the stages; few sequences are split, many are not."""
    for head_size in (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float32):
            _, block_n, _, stages = flash.choose_config(head_size, dtype)
            assert 2 * stages * block_n * head_size * dtype.itemsize <= 200 * 1024
    few = paged.choose_config(1, 8, 32768, torch.bfloat16, sms=132)
    many = paged.choose_config(256, 8, 1024, torch.bfloat16, sms=132)
    assert 8 * few.num_splits >= 132
    assert many.num_splits == 1
    assert paged.choose_config(1, 8, 100, torch.bfloat16, sms=132).num_splits == 1


parts = st.lists(st.integers(0, 6), min_size=3, max_size=3)


@settings(max_examples=50)
@given(parts, st.integers(0, 2**31))
def test_merging_attention_states_is_associative(sizes: list[int], seed: int) -> None:
    """And gives attention over all keys, empty parts included, so keys can be split anywhere."""
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(n, generator=generator, dtype=torch.float64) * 5 for n in sizes]
    values = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in sizes]

    def state(s: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(s, 0) @ v, torch.logsumexp(s, 0)

    a, b, c = (state(s, v) for s, v in zip(scores, values, strict=True))
    left = merge_attn_states(merge_attn_states(a, b), c)
    right = merge_attn_states(a, merge_attn_states(b, c))
    whole = state(torch.cat(scores), torch.cat(values))
    for x, y, z in zip(left, right, whole, strict=True):
        torch.testing.assert_close(x, y)
        torch.testing.assert_close(x, z)
