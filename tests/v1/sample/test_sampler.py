"""The sampler's steps, each and together, against a plain NumPy oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.sample.metadata import encode_seed
from nanovllm.v1.sample.sampler import Sampler
from tests.v1.sample import sampling_oracle as oracle
from tests.v1.sample.sampling_oracle import Row, make_metadata

VOCAB = 97


def random_row(rng: np.random.Generator) -> Row:
    """A request that uses each feature or not, by the toss of a coin."""

    def maybe(value: object, default: object) -> object:
        return value if rng.random() < 0.4 else default

    tokens = [int(t) for t in rng.integers(0, VOCAB, 30)]
    output = [int(t) for t in rng.integers(0, VOCAB, rng.integers(0, 12))]
    params = SamplingParams(
        temperature=maybe(0.0, float(rng.uniform(0.3, 2.0))),
        top_k=maybe(int(rng.integers(1, VOCAB + 20)), 0),
        top_p=maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        min_p=maybe(float(rng.uniform(0.0, 0.5)), 0.0),
        seed=int(rng.integers(0, 2**62)),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        stop_token_ids=tokens[:3],
        min_tokens=maybe(8, 0),
        logit_bias=maybe({t: float(rng.uniform(-5, 5)) for t in tokens[3:9]}, None),
        allowed_token_ids=maybe(tokens[5:], None),
        logprobs=maybe(int(rng.integers(0, 6)), None),
    )
    words = [[tokens[0]], [*output[-1:], tokens[1]], [*output[-2:], tokens[2]], [5, 5, 5]]
    prompt = [int(t) for t in rng.integers(0, VOCAB, rng.integers(1, 20))]
    return Row(params, prompt, output, maybe(words, None))


def random_batch(seed: int, size: int = 16) -> tuple[list[Row], torch.Tensor]:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng) for _ in range(size - 1)]
    rows.append(Row(SamplingParams(temperature=1.0, seed=seed)))  # one that asks for nothing
    logits = torch.from_numpy(rng.normal(0, 3, (size, VOCAB)).astype(np.float32))
    return rows, logits


@pytest.mark.parametrize("seed", range(25))
def test_every_step_equals_the_oracle_in_batches_where_every_row_differs(seed: int) -> None:
    """Processed logits, sampled tokens, logprobs and ranks of mixed batches equal the oracle's."""
    rows, logits = random_batch(seed)
    metadata = make_metadata(rows, VOCAB)
    raw = logits.double().numpy()
    processed = Sampler().apply_logits_processors(logits.clone(), metadata)
    result = Sampler().forward(logits.clone(), metadata)
    assert result.sampled_token_ids.dtype == torch.int32
    assert result.sampled_token_ids.shape == (len(rows), 1)
    for i, row in enumerate(rows):
        expected = oracle.apply_penalties(oracle.apply_masks_and_bias(raw[i], row), row)
        np.testing.assert_allclose(processed[i].numpy(), expected, rtol=1e-5, atol=1e-5)
        if row.params.temperature == 0:
            token = int(np.argmax(expected))
        else:
            filtered = oracle.apply_filters(expected, row.params)
            token = oracle.seeded_draw(filtered, row.params.seed, row.position)
        assert result.sampled_token_ids[i].item() == token, (i, row)
        check_logprobs(result.logprobs_tensors, metadata.max_num_logprobs, i, raw[i], token)


def check_logprobs(tensors, num: int, i: int, raw: np.ndarray, token: int) -> None:
    ids, logprobs, rank = oracle.logprobs_of(raw, token, num)
    assert tensors.logprob_token_ids[i].tolist() == ids
    assert tensors.selected_token_ranks[i].item() == rank
    np.testing.assert_allclose(tensors.logprobs[i].numpy(), logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_logprobs", [0, 3, VOCAB])
def test_logprobs_are_those_of_the_raw_logits(num_logprobs: int) -> None:
    """Neither temperature nor penalties nor filters show in the logprobs; 0 asks for the sampled
    token only and the vocabulary's size for all."""
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(0, 3, (1, VOCAB)).astype(np.float32))
    params = SamplingParams(
        temperature=0.5, seed=3, top_k=4, presence_penalty=1.5, logprobs=num_logprobs
    )
    row = Row(params, [1, 2], [3, 4])
    result = Sampler().forward(logits.clone(), make_metadata([row], VOCAB))
    token = result.sampled_token_ids.item()
    assert result.logprobs_tensors.logprobs.shape == (1, num_logprobs + 1)
    check_logprobs(result.logprobs_tensors, num_logprobs, 0, logits[0].double().numpy(), token)


def test_the_rank_of_a_token_counts_its_ties() -> None:
    """As in vLLM, a rank is the number of tokens at least as likely, the token itself included."""
    logprobs = Sampler.compute_logprobs(torch.tensor([[1.0, 3.0, 3.0, 2.0]]).repeat(4, 1))
    ranks = Sampler.gather_logprobs(logprobs, 2, torch.arange(4)).selected_token_ranks
    assert ranks.tolist() == [4, 2, 2, 3]
    assert ranks.dtype == torch.int32


def test_logprobs_of_half_precision_logits_are_computed_in_float32() -> None:
    """bfloat16 logits give float32 logprobs that sum to one, and are left as they were."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = logits.clone()
    rows = [Row(SamplingParams(temperature=0.7, seed=i, logprobs=2)) for i in range(3)]
    result = Sampler().forward(logits, make_metadata(rows, 5000))
    assert torch.equal(logits, before)
    assert result.logprobs_tensors.logprobs.dtype == torch.float32
    sums = Sampler.compute_logprobs(logits).exp().sum(-1)
    torch.testing.assert_close(sums, torch.ones(3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(10))
def test_a_rows_token_does_not_depend_on_the_other_rows_parameters(seed: int) -> None:
    """Whatever the other rows ask for, row 3 (seeded or not) gets the same token."""
    for own_seed in (7, None):
        row = Row(SamplingParams(temperature=1.3, top_p=0.9, min_p=0.01, seed=own_seed))
        tokens = set()
        for other in range(8):
            rows, logits = random_batch(seed * 100 + other)
            rows[3] = row
            logits[3] = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
            sampled = Sampler(seed=5).forward(logits, make_metadata(rows, VOCAB)).sampled_token_ids
            tokens.add(sampled[3].item())
        assert len(tokens) == 1


def test_a_seeded_request_draws_the_same_tokens_alone_and_anywhere_in_any_batch() -> None:
    """Alone, in every row of a batch, in reversed order, with another engine seed and after other
    steps: always the token that (seed, position) determine."""
    rows, logits = random_batch(11)
    alone = [
        Sampler(seed=i).forward(logits[i : i + 1].clone(), make_metadata([row], VOCAB))
        for i, row in enumerate(rows)
    ]
    expected = [result.sampled_token_ids.item() for result in alone]
    sampler = Sampler(seed=99)
    for order in (
        [*range(16)],
        [*reversed(range(16))],
        [*np.random.default_rng(0).permutation(16)],
    ):
        batch = make_metadata([rows[i] for i in order], VOCAB)
        sampled = sampler.forward(logits[order].clone(), batch).sampled_token_ids.squeeze(1)
        assert sampled.tolist() == [expected[i] for i in order]


def test_a_seeded_request_draws_anew_at_every_position() -> None:
    """The same logits at 200 positions give many different tokens: the noise moves on."""
    rows = [Row(SamplingParams(seed=1), prompt=[0] * n) for n in range(1, 201)]
    sampled = Sampler().forward(torch.zeros(200, VOCAB), make_metadata(rows, VOCAB))
    assert len(set(sampled.sampled_token_ids.flatten().tolist())) > VOCAB // 2


def test_unseeded_rows_follow_the_samplers_seed() -> None:
    """Two samplers of one seed agree over several steps; rows and steps differ among themselves."""
    rows = [Row(SamplingParams()) for _ in range(8)]
    first, second, other = Sampler(seed=1), Sampler(seed=1), Sampler(seed=2)

    def run(sampler: Sampler) -> list[list[int]]:
        logits = torch.zeros(8, 1000)
        return [
            sampler.forward(logits.clone(), make_metadata(rows, 1000))
            .sampled_token_ids.flatten()
            .tolist()
            for _ in range(4)
        ]

    drawn = run(first)
    assert drawn == run(second)
    assert drawn != run(other)
    assert len({token for step in drawn for token in step}) > 25


def test_greedy_rows_take_their_own_argmax_whatever_the_others_do() -> None:
    """Temperature 0 in a mixed batch is the argmax of the processed row."""
    rows, logits = random_batch(3)
    for row in rows[::2]:
        row.params = SamplingParams(temperature=0, presence_penalty=row.params.presence_penalty)
        row.bad_words = None
    sampled = Sampler().forward(logits.clone(), make_metadata(rows, VOCAB)).sampled_token_ids
    for i in range(0, len(rows), 2):
        expected = oracle.apply_penalties(logits[i].double().numpy(), rows[i])
        assert sampled[i].item() == int(np.argmax(expected))


@pytest.mark.parametrize("vocab_size", [5, 1000, 70_000])
def test_of_equal_greatest_logits_the_lowest_token_id_is_greedy(vocab_size: int) -> None:
    """Ties go to the first maximum, also where the vector kernels split a row."""
    logits = torch.zeros(4, vocab_size)
    first = [0, 1, vocab_size // 2, vocab_size - 2]
    for i, token in enumerate(first):
        logits[i, [token, vocab_size - 1]] = 1.0
    assert Sampler.greedy_sample(logits).tolist() == first


def test_an_all_greedy_batch_only_takes_an_argmax() -> None:
    """Without logprobs there is no softmax, sort, noise or copy of the logits."""
    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket._qualified_op_name)
            return func(*args, **(kwargs or {}))

    metadata = make_metadata([Row(SamplingParams(temperature=0))] * 4, VOCAB)
    with Record():
        Sampler().forward(torch.zeros(4, VOCAB), metadata)
    assert "aten::argmax" in seen
    assert set(seen) <= {"aten::zeros", "aten::argmax", "aten::_to_copy", "aten::unsqueeze"}


def test_a_row_with_nothing_allowed_harms_nobody() -> None:
    """All logits -inf, or NaN, give some token of the vocabulary and leave the other rows alone."""
    rows = [Row(SamplingParams(seed=i, top_k=3, top_p=0.5)) for i in range(4)]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = Sampler().forward(logits.clone(), make_metadata(rows, VOCAB)).sampled_token_ids
    logits[1] = -float("inf")
    logits[2] = float("nan")
    sampled = Sampler().forward(logits, make_metadata(rows, VOCAB)).sampled_token_ids
    assert sampled[[0, 3]].tolist() == expected[[0, 3]].tolist()
    assert ((sampled >= 0) & (sampled < VOCAB)).all()


@pytest.mark.parametrize(
    ("seed", "encoded"),
    [
        (None, -1),
        (0, 0),
        (-1, -2),
        (-(2**63), -(2**63)),
        (2**63 - 1, 2**63 - 1),
        (2**63 + 4, -(2**63) + 4),
    ],
)
def test_a_seed_is_never_mistaken_for_no_seed(seed: int | None, encoded: int) -> None:
    """Child seeds may wrap or reach -1; the encoded one still fits 64 bits and is not -1."""
    assert encode_seed(seed) == encoded


# ---- distributions ----

FIVE = np.array([2.0, 1.0, 0.5, 0.0, -1.0])
CHI2_999 = {0: 0.0, 1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47}  # 99.9th percentiles
NUM_DRAWS = 20_000
VARIANTS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
]


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's statistic over the tokens that may occur; infinite if another one did."""
    if counts[probs == 0].any():
        return np.inf
    expected = probs[probs > 0] * counts.sum()
    return float(((counts[probs > 0] - expected) ** 2 / expected).sum())


def draw(params: SamplingParams, how: str) -> np.ndarray:
    """Counts of the five tokens over 20,000 draws, in 100 steps of 200 rows."""
    metadata = make_metadata([Row(params)] * 200, 5)
    draws = torch.arange(NUM_DRAWS).view(100, 200)
    logits = torch.from_numpy(np.tile(FIVE, (200, 1)).astype(np.float32))
    sampler, counts = Sampler(seed=0), np.zeros(5)
    for numbers in draws:
        if how == "many seeds":
            metadata.seeds, metadata.positions = numbers, torch.ones_like(numbers)
        elif how == "one seed, many positions":
            metadata.seeds, metadata.positions = torch.full_like(numbers, 42), numbers
        sampled = sampler.forward(logits.clone(), metadata).sampled_token_ids.flatten()
        counts += np.bincount(sampled.numpy(), minlength=5)
    return counts


@pytest.mark.parametrize("how", ["unseeded", "many seeds", "one seed, many positions"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_twenty_thousand_draws_have_the_distribution_asked_for(how: str, variant: dict) -> None:
    """Chi-square of 20,000 draws from five tokens stays below its 99.9th percentile."""
    params = SamplingParams(**variant)
    probs = np.exp(oracle.log_softmax(oracle.apply_filters(FIVE, params)))
    counts = draw(params, how)
    assert counts.sum() == NUM_DRAWS
    assert chi_square(counts, probs) < CHI2_999[int((probs > 0).sum()) - 1]


def test_the_chi_square_test_notices_a_temperature_that_is_off_by_a_tenth() -> None:
    """The test above has power: draws at temperature 1.1 are not accepted as draws at 1."""
    counts = draw(SamplingParams(temperature=1.1), "unseeded")
    assert chi_square(counts, np.exp(oracle.log_softmax(FIVE))) > CHI2_999[4]
