"""The persistent batch: rows stay dense, and a request's data goes wherever its row goes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.sample.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessors,
    MoveDirectionality,
)
from nanovllm.v1.sample.metadata import UNSEEDED
from nanovllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

VOCAB_SIZE, MAX_NUM_REQS, MAX_MODEL_LEN, BLOCK_SIZE = 50, 6, 32, 4


@dataclass
class RowWatcher(LogitsProcessor):
    """A logits processor that only believes what it is told: row -> the request's output list."""

    rows: dict[int, list[int]] = field(default_factory=dict)
    calls: int = 0

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.calls += 1
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row)
        for row, _, _, output_token_ids in batch_update.added:
            self.rows[row] = output_token_ids
        for source, target, direction in batch_update.moved:
            assert direction == MoveDirectionality.UNIDIRECTIONAL
            self.rows[target] = self.rows.pop(source)
        assert len(self.rows) == batch_update.batch_size

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True


def make_batch(*processors: LogitsProcessor) -> InputBatch:
    return InputBatch(
        max_num_reqs=MAX_NUM_REQS,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
        device=torch.device("cpu"),
        pin_memory=False,
        vocab_size=VOCAB_SIZE,
        block_size=BLOCK_SIZE,
        logitsprocs=LogitsProcessors(processors),
    )


def make_request(req_id: str, **changes) -> CachedRequestState:
    params = changes.pop("sampling_params", None) or SamplingParams(temperature=0)
    state = {"prompt_token_ids": [1, 2, 3], "block_ids": [1], "num_computed_tokens": 0}
    return CachedRequestState(req_id=req_id, sampling_params=params, **(state | changes))


def update(batch: InputBatch, remove=(), add=()) -> None:
    """One step's changes, in the order that the runner makes them."""
    for req_id in remove:
        batch.remove_request(req_id)
    for request in add:
        batch.add_request(request)
    batch.condense()
    batch.refresh_metadata()


tokens = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def sampling_params(draw) -> SamplingParams:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.3])),
        top_p=draw(st.sampled_from([1.0, 0.5])),
        top_k=draw(st.sampled_from([0, -1, 7, VOCAB_SIZE + 5])),
        seed=draw(st.sampled_from([None, 0, 12345])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.5])),
        logprobs=draw(st.sampled_from([None, 0, 3, -1])),
        allowed_token_ids=draw(st.sampled_from([None, None, [4, 9]])),
    )
    params._bad_words_token_ids = draw(st.sampled_from([None, [[5, 6]]]))
    return params


@st.composite
def request_states(draw, req_id: str) -> CachedRequestState:
    request = make_request(
        req_id,
        prompt_token_ids=draw(st.lists(tokens, min_size=1, max_size=16)),
        block_ids=draw(st.lists(st.integers(1, 99), min_size=1, max_size=8)),
        output_token_ids=draw(st.lists(tokens, max_size=15)),
        sampling_params=draw(sampling_params()),
    )
    request.num_computed_tokens = draw(st.integers(0, request.num_tokens))
    return request


def check_row(batch: InputBatch, row: int, request: CachedRequestState) -> None:
    """Everything the batch holds in `row` is what `request` says."""
    n, params = request.num_tokens, request.sampling_params
    assert batch.req_id_to_index[request.req_id] == row
    assert batch.req_output_token_ids[row] is request.output_token_ids
    known = request.prompt_token_ids + request.output_token_ids
    assert batch.token_ids_cpu[row, :n].tolist() == known
    assert batch.num_tokens_no_spec[row] == n
    assert batch.num_prompt_tokens[row] == request.num_prompt_tokens
    assert batch.num_computed_tokens_cpu[row] == request.num_computed_tokens
    num_blocks = batch.block_table.num_blocks_per_row[row]
    table = batch.block_table.get_numpy_array()
    assert table[row, :num_blocks].tolist() == request.block_ids
    assert batch.temperature.np[row] == pytest.approx(params.temperature)
    assert batch.top_p.np[row] == params.top_p
    in_range = 0 < params.top_k < VOCAB_SIZE
    assert batch.top_k.np[row] == (params.top_k if in_range else VOCAB_SIZE)
    assert batch.frequency_penalties.np[row] == params.frequency_penalty
    assert batch.presence_penalties.np[row] == params.presence_penalty
    assert batch.repetition_penalties.np[row] == params.repetition_penalty
    assert batch.seeds.np[row] == (UNSEEDED if params.seed is None else params.seed)


def check_metadata(batch: InputBatch, requests: list[CachedRequestState]) -> None:
    """The sampling metadata describes `requests`, in row order, and says None where it may."""
    metadata, params = batch.sampling_metadata, [r.sampling_params for r in requests]
    temperatures = [p.temperature for p in params]
    assert metadata.all_greedy == all(t == 0 for t in temperatures)
    assert metadata.all_random == all(t > 0 for t in temperatures)
    if metadata.temperature is None:
        assert metadata.all_greedy
    else:
        assert metadata.temperature.tolist() == pytest.approx(temperatures)
    assert (metadata.top_p is None) == all(p.top_p == 1 for p in params)
    assert (metadata.top_k is None) == all(p.top_k in (0, -1, VOCAB_SIZE + 5) for p in params)
    assert (metadata.seeds is None) == all(p.seed is None for p in params)
    wanted = [VOCAB_SIZE if p.logprobs == -1 else p.logprobs for p in params]
    wanted = [n for n in wanted if n is not None]
    assert metadata.max_num_logprobs == (max(wanted) if wanted else None)
    assert metadata.bad_words_token_ids == {
        row: p.bad_words_token_ids for row, p in enumerate(params) if p.bad_words_token_ids
    }
    check_allowed_token_ids(metadata.allowed_token_ids_mask, params)

    penalised = [
        bool(p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1) for p in params
    ]
    assert metadata.no_penalties == (not any(penalised))
    if any(penalised):
        longest = max(r.num_prompt_tokens for r in requests)
        assert metadata.prompt_token_ids.tolist() == [
            r.prompt_token_ids + [VOCAB_SIZE] * (longest - r.num_prompt_tokens) for r in requests
        ]
    if any(penalised) or metadata.bad_words_token_ids:
        assert metadata.output_token_ids == [r.output_token_ids for r in requests]


def check_allowed_token_ids(mask: torch.Tensor | None, params: list[SamplingParams]) -> None:
    if not any(p.allowed_token_ids for p in params):
        assert mask is None
        return
    for row, p in enumerate(params):
        allowed = set(p.allowed_token_ids or range(VOCAB_SIZE))
        assert {i for i in range(VOCAB_SIZE) if not mask[row, i]} == allowed


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_after_any_changes_rows_are_dense_and_data_follows_its_request(data):
    """Any steps of removing, adding and condensing leave rows 0..n-1 in use, each with all of its
    request's data; the sampling metadata and the logits processors agree with the rows."""
    watcher = RowWatcher()
    batch, model, counter = make_batch(watcher), {}, 0
    for _ in range(data.draw(st.integers(1, 6))):
        removed = data.draw(st.sets(st.sampled_from(sorted(model)))) if model else set()
        room = MAX_NUM_REQS - len(model) + len(removed)
        added = []
        for _ in range(data.draw(st.integers(0, room))):
            added.append(data.draw(request_states(f"r{counter}")))
            counter += 1
        update(batch, sorted(removed), added)
        model = {k: v for k, v in model.items() if k not in removed}
        model |= {request.req_id: request for request in added}

        assert batch.num_reqs == len(batch.req_ids) == len(model)
        assert set(batch.req_ids) == set(model)
        requests = [model[req_id] for req_id in batch.req_ids]
        for row, request in enumerate(requests):
            check_row(batch, row, request)
            assert watcher.rows[row] is request.output_token_ids
        check_metadata(batch, requests)


def test_holes_are_filled_by_new_requests_and_then_from_the_end():
    """[a b c d e], b and d leave, f comes: f takes b's row, and e moves to d's."""
    batch = make_batch()
    update(batch, add=[make_request(req_id) for req_id in "abcde"])
    update(batch, remove=["d", "b"], add=[make_request("f")])
    assert batch.req_ids == ["a", "f", "c", "e"]


def test_removing_an_unknown_request_does_nothing():
    """A request that was preempted before it finished has no row any more."""
    batch = make_batch()
    assert batch.remove_request("ghost") is None
    update(batch)
    assert batch.req_ids == []


def test_sampling_metadata_is_rebuilt_only_when_rows_change():
    """A steady batch keeps its metadata, while the logits processors still hear of every step."""
    watcher = RowWatcher()
    batch = make_batch(watcher)
    update(batch, add=[make_request("a")])
    metadata = batch.sampling_metadata
    update(batch)
    assert batch.sampling_metadata is metadata and watcher.calls == 2
    update(batch, add=[make_request("b")])
    assert batch.sampling_metadata is not metadata


def test_a_freed_row_keeps_no_token_forbidden():
    """A request that takes the row of one with allowed_token_ids is not restricted by it."""
    batch = make_batch()
    restricted = SamplingParams(allowed_token_ids=[1])
    update(batch, add=[make_request("a", sampling_params=restricted)])
    update(batch, remove=["a"], add=[make_request("b")])
    assert batch.sampling_metadata.allowed_token_ids_mask is None
    update(batch, add=[make_request("c", sampling_params=restricted)])
    assert not batch.sampling_metadata.allowed_token_ids_mask[0].any()
