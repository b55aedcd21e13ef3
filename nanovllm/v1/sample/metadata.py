"""What the sampler has to know about the rows of one batch, as tensors on the logits' device.

`InputBatch` keeps these columns between steps and makes a SamplingMetadata when a row changes; a
column that no row of the batch uses is None, so that the sampler skips its step altogether.

Upstream: vllm/v1/sample/metadata.py (0.23.0). Upstream carries `generators`, a torch.Generator per
seeded row; here `seeds` and `positions` take its place (see ops/seeded_noise.py).
Left out: logprob_token_ids, speculative tokens, the thinking budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.v1.sample.logits_processor.state import LogitsProcessors

UNSEEDED = -1


def encode_seed(seed: int | None) -> int:
    """A request's seed as it stands in `SamplingMetadata.seeds`: 64 bits, -1 where there is none.

    Any int is taken: beyond 64 bits it wraps, and -2 stands in for -1, since a seed must never read
    as "unseeded".
    """
    if seed is None:
        return UNSEEDED
    wrapped = (seed + 2**63) % 2**64 - 2**63
    return -2 if wrapped == UNSEEDED else wrapped


@dataclass
class SamplingMetadata:
    """One row a request, in the order of the logits' rows. A row of a column that its request does
    not use holds the neutral value named here.

    Who reads the tokens of output_token_ids on the host, and so needs what has been sampled to have
    arrived there: bad words, and penalties unless output_token_ids_tensor is given. Everything else
    works one step ahead of the host; min_tokens asks only how many there are, and an unknown one
    counts.
    """

    # [num_reqs] float32; below 1e-5 the row is greedy. None if all_greedy.
    temperature: torch.Tensor | None
    all_greedy: bool
    all_random: bool

    top_p: torch.Tensor | None  # [num_reqs] float32; neutral: 1
    top_k: torch.Tensor | None  # [num_reqs] int32; neutral: vocab_size

    # [num_reqs] int64, UNSEEDED (-1) or encode_seed(seed). None: no row is seeded.
    seeds: torch.Tensor | None
    # [num_reqs] int64, the sampled token's index in its sequence: the number of tokens before it.
    positions: torch.Tensor | None

    # The most that any row asks for (vocab_size for "all", never -1); 0: the sampled token's only;
    # None: none.
    max_num_logprobs: int | None

    no_penalties: bool
    # [num_reqs, max_prompt_len] int64, padded with vocab_size. None if no_penalties.
    prompt_token_ids: torch.Tensor | None
    frequency_penalties: torch.Tensor  # [num_reqs] float32; neutral: 0
    presence_penalties: torch.Tensor  # [num_reqs] float32; neutral: 0
    repetition_penalties: torch.Tensor  # [num_reqs] float32; neutral: 1

    # Tokens generated so far; read only for penalties and bad words. -1 stands for one not known
    # yet.
    output_token_ids: list[list[int]]

    # [num_reqs, vocab_size] bool, True = forbidden.
    allowed_token_ids_mask: torch.Tensor | None

    # Row -> the token id sequences that must not be completed.
    bad_words_token_ids: dict[int, list[list[int]]]

    logitsprocs: LogitsProcessors

    # For penalties on a GPU, in place of output_token_ids: [num_reqs, max_output_len], padded with
    # vocab_size (ops/penalties.py, make_output_matrix), and [num_reqs] the token sampled last, if
    # it is not in there yet; -1: none.
    output_token_ids_tensor: torch.Tensor | None = None
    last_sampled_token_ids: torch.Tensor | None = None
