"""Top-k and top-p: the quick CPU path, the plain path and the oracle keep the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.sample.ops import topk_topp_sampler
from nanovllm.v1.sample.ops.seeded_noise import row_keys
from nanovllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from tests.v1.sample.sampling_oracle import apply_filters


def random_case(
    seed: int, num_rows: int, vocab_size: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, keys, k and p; about half of the rows have no k, half no p, a quarter neither."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, scale, (num_rows, vocab_size)).astype(np.float32))
    has_k, has_p = rng.random(num_rows) < 0.5, rng.random(num_rows) < 0.5
    k = np.where(has_k, rng.integers(1, vocab_size // 2, num_rows), vocab_size)
    p = np.where(has_p, rng.uniform(0.01, 1, num_rows), 1.0)
    keys = row_keys(torch.arange(num_rows), torch.full((num_rows,), seed))
    return logits, keys, torch.from_numpy(k.astype(np.int32)), torch.from_numpy(p).float()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tied", [False, True])
def test_filtered_logits_equal_the_oracles(seed: int, tied: bool) -> None:
    """With k only, p only and both; with distinct logits and with many equal ones."""
    logits, _, k, p = random_case(seed, 12, 60, 2.0)
    if tied:
        logits = logits.round()
    for use_k, use_p in ((k, None), (None, p), (k, p)):
        filtered = apply_top_k_top_p(logits.clone(), use_k, use_p)
        for i in range(12):
            params = SamplingParams(
                top_k=int(k[i]) if use_k is not None else 0,
                top_p=float(p[i]) if use_p is not None else 1.0,
            )
            expected = apply_filters(logits[i].double().numpy(), params)
            assert np.array_equal(filtered[i].isneginf().numpy(), np.isneginf(expected)), (
                i,
                params,
            )


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tied", [False, True])
def test_the_quick_cpu_path_gives_the_tokens_of_the_plain_one(
    seed: int, scale: float, tied: bool
) -> None:
    """From nuclei of a few tokens to such of nearly the whole vocabulary, ties included."""
    logits, keys, k, p = random_case(seed, 12, 5000, scale)
    if tied:
        logits = logits.bfloat16().float()
    sampler = TopKTopPSampler()
    for use_k, use_p in ((k, None), (None, p), (k, p), (k.clamp(max=40), p)):
        plain = sampler.forward_native(logits.clone(), keys, use_k, use_p)
        assert torch.equal(sampler.forward_cpu(logits.clone(), keys, use_k, use_p), plain)


def test_a_small_top_k_never_sorts_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """k = 50 of 5,000 tokens looks at 100 candidates, once."""
    sizes = []
    inner = topk_topp_sampler._sample_among_largest

    def record(logits, noise_keys, k, p, size):
        sizes.append(size)
        return inner(logits, noise_keys, k, p, size)

    monkeypatch.setattr(topk_topp_sampler, "_sample_among_largest", record)
    logits, keys, _, p = random_case(0, 12, 5000, 1.0)
    TopKTopPSampler().forward(logits, keys, torch.full((12,), 50, dtype=torch.int32), p)
    assert sizes == [100]


def test_rows_with_few_allowed_tokens_need_no_more_candidates() -> None:
    """Where fewer tokens than k are possible at all, each of them stays possible."""
    logits = torch.full((400, 3000), -float("inf"))
    logits[:, [7, 1500, 2999]] = 0.0
    keys = row_keys(torch.arange(400), torch.zeros(400, dtype=torch.int64))
    sampled = TopKTopPSampler()(logits, keys, torch.full((400,), 20, dtype=torch.int32), None)
    assert set(sampled.tolist()) == {7, 1500, 2999}


def test_top_k_of_one_is_the_argmax_whatever_the_noise() -> None:
    """One candidate always wins."""
    logits, keys, _, _ = random_case(5, 50, 700, 1.0)
    k = torch.ones(50, dtype=torch.int32)
    assert torch.equal(TopKTopPSampler()(logits.clone(), keys, k, None), logits.argmax(dim=-1))


def test_a_tiny_top_p_keeps_the_most_likely_token() -> None:
    """The first token stays though it alone exceeds p."""
    logits, keys, _, _ = random_case(6, 50, 700, 1.0)
    p = torch.full((50,), 1e-6)
    assert torch.equal(TopKTopPSampler()(logits.clone(), keys, None, p), logits.argmax(dim=-1))


def test_top_p_of_one_cuts_nothing_beside_rows_that_cut() -> None:
    """The least likely of 5,000 tokens survives although rounded masses reach 1 before it."""
    logits = torch.linspace(30, -30, 5000).repeat(2, 1)
    filtered = apply_top_k_top_p(logits.clone(), None, torch.tensor([1.0, 0.5]))
    assert torch.equal(filtered[0], logits[0])
    assert filtered[1].isneginf().sum() > 4900


@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_sampling_in_blocks_changes_nothing(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows share a block, the tokens are the same."""
    logits, keys, _, _ = random_case(7, num_rows, 500, 1.0)
    expected = topk_topp_sampler.random_sample(logits, keys)
    for block_numel in (1, 1000, 2**30):
        monkeypatch.setattr(topk_topp_sampler, "_CPU_BLOCK_NUMEL", block_numel)
        assert torch.equal(topk_topp_sampler.random_sample(logits, keys), expected)
