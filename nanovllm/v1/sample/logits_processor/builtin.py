"""The built-in logits processors.

Each keeps on the host what every row asked for, and on the device just the flat index lists that
`apply` needs; these are rebuilt only when something changed, so a decode step costs one scatter,
or nothing at all.

Upstream: vllm/v1/sample/logits_processor/builtin.py (0.23.0)
Left out: apply_with_spec_decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from nanovllm.v1.utils import async_tensor_h2d

T = TypeVar("T")


class MinPLogitsProcessor(LogitsProcessor):
    """Drops tokens less likely than min_p times the row's most likely token.

    Upstream compares probabilities; p < min_p * p_max is the same as logit < logit_max +
    log(min_p), which needs no softmax. (log(0) = -inf: rows without min-p lose nothing.)
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.device = device
        self.min_p_cpu = torch.zeros(max_num_reqs, dtype=torch.float32, device="cpu")
        self.log_min_p = torch.empty((0, 1), device=device)  # [num_reqs, 1], natural logarithms
        self.min_p_count = 0  # rows that use it

    def is_argmax_invariant(self) -> bool:
        return True

    def is_idle(self) -> bool:
        return not self.min_p_count

    def get_min_p_by_index(self, index: int) -> float:
        return float(self.min_p_cpu[index])

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        column = self.min_p_cpu.numpy()
        for index in batch_update.removed:
            column[index] = 0
        for index, params, _, _ in batch_update.added:
            column[index] = params.min_p
        for a, b, direction in batch_update.moved:
            after_a = column[b] if direction == MoveDirectionality.SWAP else 0
            column[b], column[a] = column[a], after_a
        min_p = self.min_p_cpu[: batch_update.batch_size]
        self.min_p_count = int(min_p.count_nonzero())
        if self.min_p_count:
            self.log_min_p = async_tensor_h2d(min_p.log().unsqueeze(1), self.device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.min_p_count:
            return logits
        threshold = logits.amax(dim=-1, keepdim=True) + self.log_min_p
        return logits.masked_fill_(logits < threshold, -float("inf"))


class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds a number to the logits of the tokens that a request names."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.biases: dict[int, dict[int, float]] = {}  # row -> token id -> bias
        self.logits_slice = _logits_slice((), device)
        self.bias_tensor = torch.empty(0, device=device)  # one an index pair

    def is_argmax_invariant(self) -> bool:
        return False

    def is_idle(self) -> bool:
        return not self.biases

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if not process_dict_updates(
            self.biases, batch_update, lambda params, _, __: params.logit_bias or None
        ):
            return
        self.logits_slice = _logits_slice(self.biases.items(), self.device)
        values = [bias for row in self.biases.values() for bias in row.values()]
        self.bias_tensor = async_tensor_h2d(
            torch.tensor(values, dtype=torch.float32, device="cpu"), self.device
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.biases:
            logits[self.logits_slice] += self.bias_tensor
        return logits


class MinTokensLogitsProcessor(LogitsProcessor):
    """Forbids stop and end-of-sequence tokens until a request has min_tokens output tokens."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # row -> (min_tokens, the request's own list of output tokens, the ids to forbid)
        self.min_toks: dict[int, tuple[int, list[int], set[int]]] = {}
        self.logits_slice = _logits_slice((), device)

    def is_argmax_invariant(self) -> bool:
        return False

    def is_idle(self) -> bool:
        return not self.min_toks

    @staticmethod
    def add_request(
        params: SamplingParams, _: list[int] | None, output_token_ids: list[int]
    ) -> tuple[int, list[int], set[int]] | None:
        if len(output_token_ids) >= params.min_tokens:
            return None
        return params.min_tokens, output_token_ids, params.all_stop_token_ids

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        changed = process_dict_updates(self.min_toks, batch_update, self.add_request)
        done = [row for row, (n, output, _) in self.min_toks.items() if len(output) >= n]
        for row in done:
            del self.min_toks[row]
        if changed or done:
            forbidden = ((row, stop_ids) for row, (_, _, stop_ids) in self.min_toks.items())
            self.logits_slice = _logits_slice(forbidden, self.device)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.min_toks:
            # (See ops/bad_words.py.)
            logits.index_put_(self.logits_slice, logits.new_full((), -float("inf")))
        return logits


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Apply a batch update to a processor's state, a dict from row to whatever it keeps there.

    Args:
        req_entries: changed in place. Rows that do not use the processor have no entry.
        new_state: (params, prompt_token_ids, output_token_ids) -> an added request's entry.

    Returns:
        Whether any entry came, went or moved.
    """
    if batch_update is None:
        return False
    changed = False
    for index in batch_update.removed:
        changed |= req_entries.pop(index, None) is not None
    for index, params, prompt_token_ids, output_token_ids in batch_update.added:
        state = new_state(params, prompt_token_ids, output_token_ids)
        changed |= _put(req_entries, index, state)
    for a, b, direction in batch_update.moved:
        entry_a, entry_b = req_entries.get(a), req_entries.get(b)
        changed |= _put(req_entries, b, entry_a)
        changed |= _put(req_entries, a, entry_b if direction == MoveDirectionality.SWAP else None)
    return changed


def _put(req_entries: dict[int, T], index: int, entry: T | None) -> bool:
    """Set or clear a row's entry; False if there was none and there is none."""
    previous = req_entries.pop(index, None)
    if entry is not None:
        req_entries[index] = entry
    return previous is not None or entry is not None


def _logits_slice(
    token_ids_by_row: Iterable[tuple[int, Iterable[int]]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) of logits, int64, as an advanced index on `device`."""
    pairs = [(row, token_id) for row, ids in token_ids_by_row for token_id in ids]
    rows, columns = zip(*pairs, strict=True) if pairs else ((), ())
    as_index = (
        async_tensor_h2d(torch.tensor(ids, dtype=torch.int64, device="cpu"), device)
        for ids in (rows, columns)
    )
    return next(as_index), next(as_index)
