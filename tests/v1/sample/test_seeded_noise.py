"""The noise is a pure function, uniform, and without visible relation between neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm.v1.sample.ops.seeded_noise import _TO_UNIT, gumbel_noise, row_keys, uniform_noise
from tests.v1.sample.sampling_oracle import noise_bits

INT64 = torch.iinfo(torch.int64)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[num_rows, num_tokens]"""
    token_ids = torch.arange(num_tokens, dtype=torch.int32).unsqueeze(0)
    return uniform_noise(row_keys(seeds, positions), token_ids)


def test_the_hash_equals_the_one_in_python_integers() -> None:
    """Wrapping products, logical shifts and sign bits: all as unbounded integers say, also at the
    extremes of seeds, positions and token ids."""
    seeds = torch.tensor([0, 1, -2, 12345, INT64.min, INT64.max])
    positions = torch.tensor([0, 1, 131071, 7, 2**40, 3])
    token_ids = torch.tensor([[0, 1, 2, 49151, 151935, 2**31 - 1]], dtype=torch.int32)
    expected = [
        [(noise_bits(s, p, t) + 0.5) / 2**31 for t in token_ids[0].tolist()]
        for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    noise = uniform_noise(row_keys(seeds, positions), token_ids)
    np.testing.assert_allclose(noise.numpy(), np.array(expected), rtol=2e-7)


def test_the_noise_of_a_token_does_not_depend_on_where_it_is_computed() -> None:
    """One row or many, all tokens or some in another order: bit for bit the same."""
    seeds, positions = torch.arange(9) * 1_000_003, torch.arange(9) ** 3
    keys = row_keys(seeds, positions)
    everything = gumbel_noise(keys, torch.arange(1000, dtype=torch.int32).unsqueeze(0))
    for row in range(9):
        assert torch.equal(row_keys(seeds[row : row + 1], positions[row : row + 1])[0], keys[row])
        some = torch.randperm(1000, generator=torch.Generator().manual_seed(row))[:37]
        alone = gumbel_noise(keys[row : row + 1], some.to(torch.int32).unsqueeze(0))
        assert torch.equal(alone[0], everything[row, some])


def test_no_hash_gives_zero_or_one() -> None:
    """The smallest and the largest hash map into (0, 1), so that both logarithms are finite."""
    extremes = torch.tensor([0, 1, 2**31 - 65, 2**31 - 1], dtype=torch.int32)
    unit = extremes.to(torch.float32).add_(0.5).mul_(_TO_UNIT)
    assert (unit > 0).all()
    assert (unit < 1).all()
    assert torch.log(-torch.log1p(-unit)).isfinite().all()
    assert (
        gumbel_noise(
            row_keys(torch.arange(64), torch.zeros(64, dtype=torch.int64)),
            torch.arange(20_000, dtype=torch.int32).unsqueeze(0),
        )
        .isfinite()
        .all()
    )


def chi_square_is_plausible(counts: np.ndarray) -> bool:
    """Within five standard deviations of its mean (degrees of freedom d: mean d, variance 2d)."""
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    return abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("shape", [(1, 1_000_000), (1000, 1000), (1_000_000, 1)], ids=str)
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_a_million_numbers_are_uniform(shape: tuple[int, int], along: str) -> None:
    """Over tokens, adjacent seeds and adjacent positions, 1,024 bins fill evenly."""
    steps, fixed = torch.arange(shape[0]), torch.full((shape[0],), 17)
    seeds, positions = (steps, fixed) if along == "seeds" else (fixed, steps)
    noise = uniforms(seeds, positions, shape[1]).numpy()
    counts, _ = np.histogram(noise, bins=1024, range=(0, 1))
    assert chi_square_is_plausible(counts)


@pytest.mark.parametrize("neighbour", ["seed", "position", "token", "seed and position"])
def test_neighbours_are_independent(neighbour: str) -> None:
    """The joint distribution of a number and its neighbour's fills a 32 by 32 grid evenly; children
    of one n > 1 request have adjacent seeds, a request's tokens adjacent positions."""
    rows = torch.arange(500)
    seeds, positions = rows * 1000, rows % 7 * 100
    first = uniforms(seeds, positions, 1000)
    if neighbour == "token":
        first, second = first[:, 0::2], first[:, 1::2]
    else:
        step = 1 if "seed" in neighbour else 0
        move = 1 if "position" in neighbour else 0
        second = uniforms(seeds + step, positions + move, 1000)
    counts, _, _ = np.histogram2d(
        first.numpy().ravel(), second.numpy().ravel(), bins=32, range=[(0, 1), (0, 1)]
    )
    assert chi_square_is_plausible(counts)


@pytest.mark.parametrize("word", ["seed", "position"])
def test_every_bit_of_a_seed_or_position_changes_half_of_the_keys_bits(word: str) -> None:
    """Avalanche: flipping any one of 63 bits flips between 40 and 60 per cent of the key's 64."""
    base = torch.arange(2000)
    zeros = torch.zeros_like(base)

    def key(values: torch.Tensor) -> np.ndarray:
        keys = row_keys(values, zeros) if word == "seed" else row_keys(zeros, values)
        return keys.numpy().view(np.uint8)

    for bit in range(63):
        changed = np.unpackbits(key(base) ^ key(base ^ (1 << bit))).mean()
        assert 0.4 < changed < 0.6, bit


def test_small_numbers_are_as_frequent_as_they_should_be() -> None:
    """A token of probability 1e-6 wins only through a small exponential: of 16 million numbers
    about 160 are below 1e-5, and those are not multiples of a coarse step."""
    noise = uniforms(torch.arange(160), torch.arange(160), 100_000)
    small = noise[noise < 1e-5]
    assert 100 < small.numel() < 230
    assert small.unique().numel() == small.numel()


def test_gumbel_noise_has_the_gumbel_distributions_mean_and_variance() -> None:
    """Mean 0.5772 (Euler's constant), variance pi squared over 6."""
    noise = gumbel_noise(
        row_keys(torch.arange(100), torch.zeros(100, dtype=torch.int64)),
        torch.arange(10_000, dtype=torch.int32).unsqueeze(0),
    ).double()
    assert abs(noise.mean().item() - 0.577216) < 0.006
    assert abs(noise.var().item() - np.pi**2 / 6) < 0.015


@pytest.mark.gpu
def test_the_noise_is_the_same_on_the_gpu() -> None:
    """Uniform numbers are equal bit for bit; the logarithms may differ in the last places."""
    seeds, positions = torch.arange(50) * 77_777_777_777 - 3, torch.arange(50)
    tokens = torch.arange(50_000, dtype=torch.int32).unsqueeze(0)
    keys = row_keys(seeds, positions)
    gpu_keys = row_keys(seeds.cuda(), positions.cuda())
    assert torch.equal(gpu_keys.cpu(), keys)
    assert torch.equal(uniform_noise(gpu_keys, tokens.cuda()).cpu(), uniform_noise(keys, tokens))
    on_gpu = gumbel_noise(gpu_keys, tokens.cuda()).cpu()
    torch.testing.assert_close(on_gpu, gumbel_noise(keys, tokens), rtol=1e-6, atol=1e-6)
