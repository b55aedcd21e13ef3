"""The counted bytes are the bytes: kernels and torch code run, their loads and stores counted."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from nanovllm.lab import memory_traffic as traffic
from nanovllm.lab.flash_attention import FlashAttentionConfig, attention_reference, flash_attention
from nanovllm.lab.memory_traffic import AttentionShape, DecodeShape
from nanovllm.lab.online_softmax import OnlineSoftmaxConfig, online_softmax
from nanovllm.lab.paged_decode import PagedDecodeConfig, paged_decode
from nanovllm.lab.softmax import SoftmaxConfig, softmax, softmax_reference
from tests.lab.support import TorchTraffic, interpreted_traffic, randn

CPU = {"device": "cpu", "dtype": torch.float32}


def test_softmax_one_operation_at_a_time() -> None:
    """Eight passes over the matrix and four over a column, seen by torch's dispatcher."""
    x = randn(6, 40, **CPU)
    with TorchTraffic() as seen:
        softmax_reference(x)
    assert seen.moved == traffic.softmax_unfused(6, 40, 4).moved


@pytest.mark.parametrize("cols", [40, 64])
def test_softmax_kernels(cols: int) -> None:
    """Twice the matrix if a row stays on the chip, three times and the states if it does not."""
    x = randn(6, cols, **CPU)
    with interpreted_traffic() as fused:
        softmax(x, config=SoftmaxConfig(2, 1))
    assert sum(fused.values()) == traffic.softmax_fused(6, cols, 4).moved == 2 * x.nbytes
    for splits in (1, 2):
        with interpreted_traffic() as seen:
            online_softmax(x, config=OnlineSoftmaxConfig(16, splits, 1, 1))
        assert sum(seen.values()) == traffic.softmax_online(6, cols, 4, splits).moved


@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_scores_in_memory(causal: bool) -> None:
    """Six times the scores if causal; the few positions a mask is made from are not counted."""
    shape = AttentionShape(2, 24, 3, 3, 16, 4, causal)
    q, k, v = (randn(2, 24, 3, 16, seed=i, **CPU) for i in range(3))
    # Matrix products take their operands in this layout without copying them.
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    with TorchTraffic(ignore=("arange", "add", "sub", "gt")) as seen:
        attention_reference(q, k, v, causal)
    assert seen.moved == traffic.attention_unfused(shape).moved


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("seq_len", "block_m", "block_n"), [(64, 16, 32), (50, 32, 16)])
def test_flash_attention(causal: bool, seq_len: int, block_m: int, block_n: int) -> None:
    """Keys and values once a tile of queries, half of them if causal."""
    q = randn(1, seq_len, 2, 16, **CPU)
    k, v = (randn(1, seq_len, 1, 16, seed=i, **CPU) for i in (1, 2))
    with interpreted_traffic() as seen:
        flash_attention(q, k, v, causal, config=FlashAttentionConfig(block_m, block_n, 4, 1))
    shape = AttentionShape(1, seq_len, 2, 1, 16, 4, causal)
    assert sum(seen.values()) == traffic.attention_flash(shape, block_m, block_n).moved


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_paged_decode(splits: int) -> None:
    """Keys and values once, whatever the number of query heads that share them."""
    seq_lens = [33, 64]
    cache = randn(8, 2, 16, 2, 16, **CPU)
    tables = torch.arange(8, dtype=torch.int32).view(2, 4)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    q = randn(2, 6, 16, **CPU)
    config = PagedDecodeConfig(16, splits, 4, 1)
    with interpreted_traffic() as everything:
        paged_decode(q, cache, tables, lens, config=config)
    with interpreted_traffic(tables, lens) as lookups:
        paged_decode(q, cache, tables, lens, config=config)
    with interpreted_traffic(cache) as cached:
        paged_decode(q, cache, tables, lens, config=config)
    shape = DecodeShape(seq_lens, 6, 2, 16, 4)
    assert cached == {"loaded": shape.kv_bytes, "stored": 0}
    moved = sum(everything.values()) - sum(lookups.values())
    assert moved == traffic.decode_paged(shape, splits).moved


def test_a_warps_load_fetches_whole_sectors() -> None:
    """Neighbours share them: 4 sectors at stride 1; 32, one a thread, from stride 8 on."""
    assert traffic.strided_load(1, 4).ratio == 1
    assert traffic.strided_load(2, 4).ratio == 2
    assert traffic.strided_load(8, 4).ratio == traffic.strided_load(4096, 4).ratio == 8
    assert traffic.strided_load(4096, 2).ratio == 16
    assert traffic.strided_load(0, 4).moved == traffic.SECTOR


def test_every_step_moves_less_than_the_one_before() -> None:
    """And none less than what is needed."""
    prefill = AttentionShape(1, 4096, 16, 8, 128, 2)
    decode = DecodeShape([4096] * 4, 16, 8, 128, 2)
    stairs = [
        [traffic.softmax_unfused, traffic.softmax_online, traffic.softmax_fused],
        [traffic.decode_gathered, traffic.decode_head_by_head, traffic.decode_paged],
    ]
    softmaxes = [step(512, 4096, 4).ratio for step in stairs[0]]
    decodes = [step(decode).ratio for step in stairs[1]]
    attentions = [
        traffic.attention_unfused(prefill).ratio,
        traffic.attention_flash(prefill, 64, 64).ratio,
        traffic.attention_flash(prefill, 128, 64).ratio,
    ]
    for ratios in (softmaxes, decodes, attentions):
        assert ratios == sorted(ratios, reverse=True)
        assert len(set(ratios)) == len(ratios)
        assert ratios[-1] >= 1


def test_the_table_is_printed() -> None:
    """`python -m nanovllm.lab`, with times if it is told a bandwidth."""
    command = [sys.executable, "-m", "nanovllm.lab", "--cols", "1000", "--rows", "1000"]
    command += ["--bandwidth", "4000"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    line = next(x for x in result.stdout.splitlines() if "softmax, fused" in x)
    # 4 MB read and 4 MB written are 2 microseconds at 4 TB/s.
    cells = [cell.strip() for cell in line.split("│")]
    assert cells[2:7] == ["8 MB", "8 MB", "1", "0.625", "0.002"]
