"""Penalties and bad words on examples small enough to check by hand."""

from __future__ import annotations

import torch

from nanovllm.v1.sample.ops.bad_words import apply_bad_words
from nanovllm.v1.sample.ops.penalties import apply_all_penalties

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
