"""Penalties and bad words on examples small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanovllm.v1.sample.ops.bad_words import apply_bad_words
from nanovllm.v1.sample.ops.penalties import apply_all_penalties, make_output_matrix

PAD = 6  # the vocabulary's size


def penalise(
    logits: list[list[float]],
    prompts: list[list[int]],
    outputs: list[list[int]],
    presence: list[float],
    frequency: list[float],
    repetition: list[float],
) -> list[list[float]]:
    columns = [torch.tensor(c) for c in (presence, frequency, repetition)]
    return apply_all_penalties(
        torch.tensor(logits), torch.tensor(prompts), *columns, outputs
    ).tolist()


def test_each_penalty_on_one_row() -> None:
    """Token 0 is in the prompt, 1 in both, 2 twice in the output, 3 nowhere."""
    row = [4.0, 4.0, -4.0, 4.0, -4.0, 0.0]
    prompt, output = [0, 1, PAD], [1, 2, 2]
    assert penalise([row], [prompt], [output], [0.0], [0.0], [2.0]) == [
        [2.0, 2.0, -8.0, 4.0, -4.0, 0.0]  # positive halved, negative doubled
    ]
    assert penalise([row], [prompt], [output], [0.0], [0.5], [1.0]) == [
        [4.0, 3.5, -5.0, 4.0, -4.0, 0.0]  # once, twice; the prompt does not count
    ]
    assert penalise([row], [prompt], [output], [1.5], [0.0], [1.0]) == [
        [4.0, 2.5, -5.5, 4.0, -4.0, 0.0]  # once each; the prompt does not count
    ]
    assert penalise([row], [prompt], [output], [1.5], [0.5], [2.0]) == [
        [2.0, 0.0, -10.5, 4.0, -4.0, 0.0]  # repetition scales first, the others subtract
    ]


def test_rows_keep_to_themselves() -> None:
    """Neutral rows, rows without output, padding and not yet known tokens (-1) change nothing."""
    row = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert penalise(
        [row] * 4,
        [[0, 1, 2], [0, PAD, PAD], [PAD, PAD, PAD], [3, PAD, PAD]],
        [[5], [], [], [-1, 4, -1]],
        [0.0, 1.0, 0.0, 1.0],
        [0.0, 1.0, 0.0, 1.0],
        [1.0, 1.0, 1.0, 1.0],
    ) == [row, row, row, [1.0, 2.0, 3.0, 4.0, 3.0, 6.0]]


def test_forbidden_tokens_stay_forbidden() -> None:
    """A penalty, even a negative one, leaves -inf as it is."""
    forbidden = -float("inf")
    (row,) = penalise([[forbidden] * 6], [[0, 1]], [[2, 3]], [-2.0], [-2.0], [0.5])
    assert row == [forbidden] * 6


def test_nothing_generated_yet() -> None:
    """In the first step all outputs are empty and only the prompt can count."""
    logits = penalise([[4.0] * 6], [[0, 1]], [[]], [1.0], [1.0], [2.0])
    assert logits == [[2.0, 2.0, 4.0, 4.0, 4.0, 4.0]]


def test_the_last_token_of_a_bad_word_is_forbidden_where_it_completes_it() -> None:
    """A word of one token always is; of several only behind its beginning, at the output's end."""
    words = [[0], [3, 4, 1], [4, 2], [9, 9, 9, 9, 5], [4, 3, 5]]
    outputs = [[3, 4], [4, 3, 3], [], [7]]
    logits = torch.zeros(4, 6)
    apply_bad_words(logits, {0: words, 1: words, 2: words}, outputs)
    forbidden = [row.isneginf().nonzero().flatten().tolist() for row in logits]
    assert forbidden == [[0, 1, 2], [0], [0], []]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(5))
def test_an_output_matrix_counts_like_lists(seed: int, device: str) -> None:
    """Outputs cut out of the rows of all tokens, the last one apart or not, give bit for bit what
    lists give; rows shown as empty are left alone."""
    rng = np.random.default_rng(seed)
    num_reqs, vocab_size, width = 12, 200, 60
    token_ids = rng.integers(0, vocab_size, (num_reqs + 3, width)).astype(np.int32)
    num_prompt = rng.integers(1, 20, num_reqs)
    num_tokens = num_prompt + rng.integers(1, 30, num_reqs) * (rng.random(num_reqs) < 0.8)
    outputs = [token_ids[i, num_prompt[i] : num_tokens[i]].tolist() for i in range(num_reqs)]
    prompts = np.where(np.arange(20) < num_prompt[:, None], token_ids[:num_reqs, :20], vocab_size)
    prompts = torch.from_numpy(prompts.astype(np.int64)).to(device)
    columns = [
        torch.from_numpy(rng.uniform(0.5, 2, num_reqs).astype(np.float32)).to(device)
        for _ in range(3)
    ]
    logits = torch.from_numpy(rng.normal(0, 3, (num_reqs, vocab_size)).astype(np.float32))
    logits = logits.to(device)
    expected = apply_all_penalties(logits.clone(), prompts, *columns, outputs)

    matrix = make_output_matrix(token_ids, num_prompt, num_tokens, vocab_size)
    assert matrix.dtype == np.int32
    matrix = torch.from_numpy(matrix).to(device)
    assert torch.equal(apply_all_penalties(logits.clone(), prompts, *columns, matrix), expected)

    # The host does not know the last token yet: it is in a tensor of its own, or there is none.
    last = torch.tensor([output[-1] if output else -1 for output in outputs], dtype=torch.int32)
    known = np.maximum(num_tokens - 1, num_prompt)
    matrix = torch.from_numpy(make_output_matrix(token_ids, num_prompt, known, vocab_size))
    args = (prompts, *columns, matrix.to(device), last.to(device))
    assert torch.equal(apply_all_penalties(logits.clone(), *args), expected)


def test_an_output_matrix_of_nothing() -> None:
    """Before the first token it has no columns."""
    tokens = np.zeros((2, 5), dtype=np.int32)
    assert make_output_matrix(tokens, np.array([3, 4]), np.array([3, 4]), 9).shape == (2, 0)
