"""Log probabilities as users see them.

Upstream: vllm/logprobs.py (0.23.0)
Left out: FlatLogprobs, a layout of the same numbers with fewer Python objects.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Logprob:
    """One candidate token at one position.

    Attributes:
        logprob: natural logarithm of its probability under the model, before any sampling
            parameter.
        rank: its place in the vocabulary by probability, 1 = the most likely.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# Candidates at one position by token id, the sampled (or prompt) token first.
LogprobsOnePosition = dict[int, Logprob]
# One entry a prompt token; the first is None, for nothing precedes that token.
PromptLogprobs = list[LogprobsOnePosition | None]
# One entry a generated token.
SampleLogprobs = list[LogprobsOnePosition]


def append_logprobs_for_next_position(
    request_logprobs: PromptLogprobs | SampleLogprobs,
    token_ids: list[int],
    logprobs: list[float],
    decoded_tokens: list[str] | list[None],
    rank: int,
    num_logprobs: int,
) -> None:
    """Append one position's candidates.

    Column 0 of the parallel lists is the sampled (or prompt) token, of rank `rank`; columns 1, 2,
    ... are the most likely tokens in order. A batch computes as many columns as its greediest
    request asked for, so a row may be longer than this request's `num_logprobs + 1`; -1 keeps them
    all. A sampled token that is also among the most likely has two columns, equal but for the rank
    where logits tie, and keeps its first place in the dict.
    """
    if num_logprobs == -1:
        num_logprobs = len(token_ids) - 1
    ranks = [rank, *range(1, num_logprobs + 1)]
    columns = zip(token_ids, logprobs, ranks, decoded_tokens, strict=False)
    request_logprobs.append(
        {
            token_id: Logprob(logprob, rank_in_vocab, decoded_token)
            for token_id, logprob, rank_in_vocab, decoded_token in columns
        }
    )
