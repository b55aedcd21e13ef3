"""Logits processors keep the right state while rows come, go and move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.sample.logits_processor import (
    BatchUpdate,
    BatchUpdateBuilder,
    LogitsProcessors,
    MoveDirectionality,
    build_logitsprocs,
)

VOCAB, MAX_REQS = 11, 6
CPU = torch.device("cpu")

request_params = st.builds(
    lambda min_p, bias, min_tokens, stop: SamplingParams(
        min_p=min_p, logit_bias=bias, min_tokens=min_tokens, stop_token_ids=stop
    ),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
    bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3),
    min_tokens=st.integers(0, 4),
    stop=st.lists(st.integers(0, VOCAB - 1), max_size=3),
)
new_requests = st.tuples(request_params, st.lists(st.integers(0, VOCAB - 1), max_size=3))


class Batch:
    """A stand-in for InputBatch: rows without a gap between steps."""

    def __init__(self) -> None:
        self.rows: list[tuple[SamplingParams, list[int]] | None] = []
        self.builder = BatchUpdateBuilder()
        self.logitsprocs = build_logitsprocs(MAX_REQS, CPU)

    def remove(self, index: int) -> None:
        self.rows[index] = None
        self.builder.removed_append(index)

    def add(self, params: SamplingParams, output: list[int]) -> None:
        index = self.builder.pop_removed()
        if index is None:
            index = len(self.rows)
            self.rows.append(None)
        self.rows[index] = (params, output)
        self.builder.added.append((index, params, [1], output))

    def condense(self) -> None:
        """The last rows move into the gaps."""
        while True:
            while self.rows and self.rows[-1] is None:
                self.rows.pop()
            gap, last = self.builder.peek_removed(), len(self.rows) - 1
            if gap is None or gap > last:
                return
            self.builder.pop_removed()
            self.rows[gap], self.rows[last] = self.rows[last], None
            self.builder.moved.append((last, gap, MoveDirectionality.UNIDIRECTIONAL))

    def swap(self, a: int, b: int) -> None:
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
        self.builder.moved.append((a, b, MoveDirectionality.SWAP))

    def update(self) -> None:
        update = self.builder.get_and_reset(len(self.rows))
        for processor in self.logitsprocs.all:
            processor.update_state(update)

    def rebuilt(self) -> LogitsProcessors:
        """Processors that have only ever seen the rows as they are now."""
        fresh = build_logitsprocs(MAX_REQS, CPU)
        added = [(i, params, [1], output) for i, (params, output) in enumerate(self.rows)]
        for processor in fresh.all:
            processor.update_state(BatchUpdate(len(self.rows), [], added, []))
        return fresh


@given(st.data())
def test_state_kept_through_any_history_equals_state_built_from_scratch(data) -> None:
    """Steps of removals, additions, condensing moves, swaps and new output tokens, in any mixture,
    leave every processor doing what a new one would do."""
    batch = Batch()
    for _ in range(data.draw(st.integers(1, 6))):
        indices = st.integers(0, max(len(batch.rows) - 1, 0))
        for index in sorted(data.draw(st.sets(indices, max_size=3)) if batch.rows else ()):
            batch.remove(index)
        free = MAX_REQS - sum(row is not None for row in batch.rows)
        for params, output in data.draw(st.lists(new_requests, max_size=min(free, 3))):
            batch.add(params, list(output))
        batch.condense()
        if len(batch.rows) > 1:
            for a, b in data.draw(st.lists(st.tuples(indices, indices), max_size=2)):
                a, b = min(a, len(batch.rows) - 1), min(b, len(batch.rows) - 1)
                if a != b:
                    batch.swap(a, b)
        batch.update()
        check_equal(batch)
        for row in batch.rows:  # a step without changes to the rows, but with one token more
            row[1].append(3)
        batch.update()
        check_equal(batch)


def check_equal(batch: Batch) -> None:
    logits = torch.linspace(-1, 1, len(batch.rows) * VOCAB).view(len(batch.rows), VOCAB)
    if not batch.rows:
        return
    for kept, fresh in zip(batch.logitsprocs.all, batch.rebuilt().all, strict=True):
        assert torch.equal(kept.apply(logits.clone()), fresh.apply(logits.clone())), type(kept)


def test_a_builder_hands_out_the_lowest_empty_row_first() -> None:
    """Rows emptied in any order are refilled from the lowest, and those left are reported."""
    builder = BatchUpdateBuilder()
    for index in (3, 0, 5):
        builder.removed_append(index)
    assert builder.peek_removed() == 0
    assert builder.pop_removed() == 0
    assert builder.removed == [5, 3]
    with pytest.raises(RuntimeError, match="Row 1 was removed after"):
        builder.removed_append(1)
    update = builder.get_and_reset(4)
    assert update == BatchUpdate(4, [5, 3], [], [])
    assert builder.get_and_reset(4) is None
    builder.removed_append(1)  # a new step may remove again
    assert update.removed == [5, 3]


def test_min_tokens_forbids_stop_tokens_until_enough_are_generated() -> None:
    """The stop tokens, EOS among them, are out until the request's list holds min_tokens."""
    params = SamplingParams(min_tokens=2, stop_token_ids=[4])
    params.update_from_generation_config({"eos_token_id": [6, 7]}, eos_token_id=7)
    output: list[int] = []
    logitsprocs = build_logitsprocs(2, CPU)
    update = BatchUpdate(2, [], [(0, SamplingParams(), [1], []), (1, params, [1], output)], [])
    for _ in range(2):
        for processor in logitsprocs.all:
            processor.update_state(update)
        update = None
        logits = torch.zeros(2, VOCAB)
        for processor in logitsprocs.non_argmax_invariant:
            logits = processor.apply(logits)
        assert logits[1].isneginf().nonzero().flatten().tolist() == [4, 6, 7]
        assert not logits[0].isneginf().any()
        output.append(0)
    for processor in logitsprocs.all:
        processor.update_state(None)
        assert torch.equal(processor.apply(torch.zeros(2, VOCAB)), torch.zeros(2, VOCAB))


def test_min_p_of_one_keeps_only_the_most_likely_tokens() -> None:
    """The threshold is the greatest probability itself; what equals it stays."""
    logitsprocs = build_logitsprocs(1, CPU)
    (min_p,) = logitsprocs.argmax_invariant
    min_p.update_state(BatchUpdate(1, [], [(0, SamplingParams(min_p=1.0), [1], [])], []))
    kept = min_p.apply(torch.tensor([[1.0, 3.0, 2.0, 3.0]]))
    assert kept.isneginf().tolist() == [[True, False, True, False]]
    assert min_p.get_min_p_by_index(0) == 1.0


def test_a_one_way_move_replaces_what_was_there_and_leaves_an_empty_row() -> None:
    """Row 2 moves onto row 0, which was in use: row 0 has its state, row 2 has none."""
    first = SamplingParams(min_p=0.5, logit_bias={1: 1.0}, min_tokens=3, stop_token_ids=[1])
    second = SamplingParams(min_p=0.25, logit_bias={2: 2.0}, min_tokens=3, stop_token_ids=[2])
    logitsprocs = build_logitsprocs(3, CPU)
    min_tokens, logit_bias = logitsprocs.non_argmax_invariant
    (min_p,) = logitsprocs.argmax_invariant
    added = [(0, first, [1], []), (2, second, [1], [])]
    for processor in logitsprocs.all:
        processor.update_state(BatchUpdate(3, [], added, []))
        processor.update_state(BatchUpdate(3, [], [], [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert logit_bias.biases == {0: {2: 2.0}}
    assert min_tokens.min_toks == {0: (3, [], {2})}
    assert min_p.min_p_cpu.tolist() == [0.25, 0.0, 0.0]


def test_a_removed_row_leaves_nothing_behind() -> None:
    """Row 1 of 2 ends: the processors' index lists no longer reach beyond the batch."""
    params = SamplingParams(min_p=0.5, logit_bias={1: 1.0}, min_tokens=3, stop_token_ids=[2])
    logitsprocs = build_logitsprocs(2, CPU)
    expected = torch.tensor([[0.0, 1.0, -float("inf"), 0.0]])
    logits = torch.zeros(1, 4)
    for processor in logitsprocs.non_argmax_invariant:
        processor.update_state(BatchUpdate(2, [], [(i, params, [1], []) for i in range(2)], []))
        processor.update_state(BatchUpdate(1, [1], [], []))
        logits = processor.apply(logits)
    assert torch.equal(logits, expected)
