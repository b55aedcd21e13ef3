"""Forbid the last token of a word where the tokens before it have just been generated.

Upstream: vllm/v1/sample/ops/bad_words.py (0.23.0). One scatter for the batch here, one slice a
word there.
Left out: the speculative-decoding variant.
"""

from __future__ import annotations

import torch

from nanovllm.v1.utils import async_tensor_h2d


def apply_bad_words(
    logits: torch.Tensor,
    bad_words_token_ids: dict[int, list[list[int]]],
    past_tokens_ids: list[list[int]],
) -> None:
    """Set the logits of tokens that would complete a bad word to -inf, in place.

    Only generated tokens count as the word's beginning, not the prompt's.

    Args:
        logits: [num_reqs, vocab_size].
        bad_words_token_ids: row -> token id sequences, none of them empty.
        past_tokens_ids: the output tokens of every row.
    """
    forbidden = [
        (row, word[-1])
        for row, words in bad_words_token_ids.items()
        for word in words
        if _ends_with(past_tokens_ids[row], word[:-1])
    ]
    if forbidden:
        pairs = torch.tensor(forbidden, dtype=torch.int64, device="cpu")
        rows, token_ids = async_tensor_h2d(pairs.T, logits.device)
        # A number on the right of `=` would be a CPU tensor, and copying it up would wait.
        logits.index_put_((rows, token_ids), logits.new_full((), -float("inf")))


def _ends_with(tokens: list[int], ending: list[int]) -> bool:
    """Whether `ending` (perhaps empty) is the tail of `tokens`."""
    return len(ending) <= len(tokens) and tokens[len(tokens) - len(ending) :] == ending
