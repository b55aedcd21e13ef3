"""Repetition, frequency and presence penalties.

Upstream: vllm/v1/sample/ops/penalties.py and vllm/model_executor/layers/utils.py (0.23.0). Upstream
goes over the whole vocabulary several times; here only the logits of tokens that occurred are
gathered, changed and put back. Same definition.
Left out: the CUDA kernel for repetition penalties.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch

from nanovllm.v1.utils import async_tensor_h2d


def apply_all_penalties(
    logits: torch.Tensor,
    prompt_token_ids: torch.Tensor,
    presence_penalties: torch.Tensor,
    frequency_penalties: torch.Tensor,
    repetition_penalties: torch.Tensor,
    output_token_ids: list[list[int]] | torch.Tensor,
    last_sampled_token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Penalise tokens that occurred, in place and in this order.

    1. In the prompt or the output: a positive logit is divided by the repetition penalty, any
       other multiplied by it.
    2. In the output: minus the frequency penalty times the number of occurrences.
    3. In the output: minus the presence penalty.

    Args:
        logits: [num_reqs, vocab_size] float32.
        prompt_token_ids: [num_reqs, max_prompt_len] int64, padded with vocab_size.
        presence_penalties, frequency_penalties, repetition_penalties: [num_reqs] float32.
        output_token_ids: one list a row; -1 (a token not known yet) is skipped. Or a matrix
            [num_reqs, max_output_len] on the device, padded with vocab_size (make_output_matrix).
        last_sampled_token_ids: [num_reqs] of an int type, on the device: one more output token a
            row, which the host may not know yet; -1: none.
    """
    num_reqs, vocab_size = logits.shape
    if isinstance(output_token_ids, torch.Tensor):
        outputs = output_token_ids.to(torch.int64)
    else:
        outputs = _convert_to_tensors(output_token_ids, vocab_size, logits.device)
    if last_sampled_token_ids is not None:
        last = last_sampled_token_ids.to(torch.int64).unsqueeze(1)
        outputs = torch.cat((outputs, last.masked_fill(last < 0, vocab_size)), dim=1)
    token_ids = torch.cat((prompt_token_ids, outputs), dim=1)
    # One column more, for the padding to be counted in. What is never looked at is never written.
    counts = torch.empty((num_reqs, vocab_size + 1), dtype=torch.float32, device=logits.device)
    counts.scatter_(1, token_ids, 0.0)
    counts.scatter_add_(1, outputs, torch.ones_like(outputs, dtype=torch.float32))

    token_ids = _without_padding(token_ids, vocab_size)
    counts = counts.gather(1, token_ids)
    penalised = logits.gather(1, token_ids)
    factors = repetition_penalties.unsqueeze(1)
    penalised = torch.where(penalised > 0, penalised / factors, penalised * factors)
    penalised -= frequency_penalties.unsqueeze(1) * counts
    penalised -= presence_penalties.unsqueeze(1) * (counts > 0)
    # A token that occurred twice is written twice, with the same value.
    return logits.scatter_(1, token_ids, penalised)


def _without_padding(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Padding (vocab_size) replaced by one of the row's own tokens, which is written back anyhow.
    A row of nothing but padding has no penalties, and its last token is written back unchanged."""
    real = token_ids.amin(dim=1, keepdim=True).clamp_(max=vocab_size - 1)
    return torch.where(token_ids == vocab_size, real, token_ids)


def make_output_matrix(
    token_ids: np.ndarray, num_prompt_tokens: np.ndarray, num_tokens: np.ndarray, vocab_size: int
) -> np.ndarray:
    """The outputs of every row, in the shape that apply_all_penalties takes.

    Args:
        token_ids: [at least num_reqs, max_model_len] int32: prompts, outputs, stale numbers.
        num_prompt_tokens: [num_reqs], where the outputs begin.
        num_tokens: [num_reqs], where they end. Where it is num_prompt_tokens the row is all
            padding, which is right for rows without penalties.

    Returns:
        [num_reqs, max_output_len] int32, padded with vocab_size.
    """
    lengths = num_tokens - num_prompt_tokens
    matrix = np.full((len(lengths), int(lengths.max(initial=0))), vocab_size, dtype=np.int32)
    # One copy a row: quicker than an index for every token.
    for row in np.flatnonzero(lengths):
        matrix[row, : lengths[row]] = token_ids[row, num_prompt_tokens[row] : num_tokens[row]]
    return matrix


def _convert_to_tensors(
    output_token_ids: list[list[int]], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """[num_reqs, max_output_len] int64, padded with vocab_size."""
    lengths = np.fromiter(map(len, output_token_ids), dtype=np.int64, count=len(output_token_ids))
    padded = np.full((len(lengths), int(lengths.max(initial=0))), vocab_size, dtype=np.int64)
    flat = np.fromiter(chain.from_iterable(output_token_ids), np.int64, count=int(lengths.sum()))
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.where(flat == -1, vocab_size, flat)
    return async_tensor_h2d(torch.from_numpy(padded), device)
