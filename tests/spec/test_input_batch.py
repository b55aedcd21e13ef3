"""InputBatch: the requests of a step as rows of arrays that persist from step to step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import initialize, invariant, precondition, rule

from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    build_logitsprocs,
)
from nanovllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from tests.spec.support import Machine, ci_examples, one_of_its

VOCAB_SIZE = 16
MAX_MODEL_LEN = 12
MAX_NUM_REQS = 4
CPU = torch.device("cpu")

PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5]),
        "top_p": st.just(0.9),
        "top_k": st.just(3),
        "min_p": st.just(0.25),
        "seed": st.integers(0, 3),
        "presence_penalty": st.just(0.5),
        "repetition_penalty": st.just(1.5),
        "logit_bias": st.just({1: 2.0}),
        "allowed_token_ids": st.just([1, 2]),
        "logprobs": st.integers(0, 3),
        "min_tokens": st.integers(1, 4),
        "stop_token_ids": st.just([5]),
        "bad": st.just([[3]]),
    },
)


def make_params(chosen: dict[str, Any]) -> SamplingParams:
    bad = chosen.get("bad")
    fields = {name: value for name, value in chosen.items() if name != "bad"}
    params = SamplingParams(max_tokens=MAX_MODEL_LEN, **fields)
    params._bad_words_token_ids = bad
    return params


@dataclass
class Row:
    """What the batch must know of one request, kept apart from it."""

    tokens: list[int]
    block_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    params: SamplingParams
    output_token_ids: list[int]


class Batch(Machine):
    """Beside the batch, `rows`: every request in it, as plain lists."""

    @initialize(block_size=st.integers(1, 4))
    def a_batch_is_made(self, block_size: int) -> None:
        """It has no rows."""
        self.block_size = block_size
        self.batch = InputBatch(
            max_num_reqs=MAX_NUM_REQS,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_NUM_REQS * MAX_MODEL_LEN,
            device=CPU,
            pin_memory=False,
            vocab_size=VOCAB_SIZE,
            block_size=block_size,
            logitsprocs=build_logitsprocs(MAX_NUM_REQS, CPU),
        )
        self.rows: dict[str, Row] = {}
        self.num_requests = 0
        self.num_blocks = 0
        self.num_moves = 0

    def _new_blocks(self, n: int) -> list[int]:
        self.num_blocks += n
        return list(range(self.num_blocks - n + 1, self.num_blocks + 1))

    @rule(
        leaving=st.runner().flatmap(
            lambda m: (
                st.lists(st.sampled_from(sorted(m.rows)), unique=True) if m.rows else st.just([])
            )
        ),
        arriving=st.lists(
            st.tuples(
                st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6),
                st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
                PARAMS,
            ),
            max_size=3,
        ),
    )
    def a_step_changes_who_is_in_the_batch(
        self, leaving: list[str], arriving: list[tuple[list[int], list[int], dict[str, Any]]]
    ) -> None:
        """Rows are freed, then filled, then condensed; then the sampler is told."""
        before = dict(self.batch.req_id_to_index)
        for req_id in leaving:
            assert self.batch.remove_request(req_id) == before[req_id]
            del self.rows[req_id]
        for prompt, output, chosen in arriving[: MAX_NUM_REQS - len(self.rows)]:
            req_id = f"r{self.num_requests}"
            self.num_requests += 1
            num_tokens = len(prompt) + len(output)
            block_ids = self._new_blocks(-(-num_tokens // self.block_size))
            row = Row(
                prompt + output, block_ids, len(prompt), num_tokens - 1, make_params(chosen), output
            )
            self.rows[req_id] = row
            self.batch.add_request(
                CachedRequestState(
                    req_id, prompt, row.params, list(block_ids), num_tokens - 1, output
                )
            )
        self.batch.condense()
        self.batch.refresh_metadata()
        after = self.batch.req_id_to_index
        self.num_moves += sum(after.get(req_id, row) != row for req_id, row in before.items())

    @precondition(lambda self: self.rows)
    @rule(req_id=one_of_its("rows"), token=st.integers(0, VOCAB_SIZE - 1))
    def a_row_gets_a_token(self, req_id: str, token: int) -> None:
        """A sampled token is written behind the row's last; a block is added if it needs one."""
        row = self.rows[req_id]
        if len(row.tokens) == MAX_MODEL_LEN:
            return
        index = self.batch.req_id_to_index[req_id]
        self.batch.token_ids_cpu[index, len(row.tokens)] = token
        row.tokens.append(token)
        row.output_token_ids.append(token)
        self.batch.num_tokens_no_spec[index] = len(row.tokens)
        row.num_computed_tokens += 1
        self.batch.num_computed_tokens_cpu[index] = row.num_computed_tokens
        missing = -(-len(row.tokens) // self.block_size) - len(row.block_ids)
        new_blocks = self._new_blocks(missing)
        row.block_ids += new_blocks
        self.batch.block_table.append_row(new_blocks, index)
        self.batch.refresh_metadata()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def slots_are_computed(self, data: st.DataObject) -> None:
        """Position p of a request is at offset p % size of its block p // size."""
        pairs = data.draw(
            st.lists(
                st.sampled_from(
                    [(r, p) for r, row in sorted(self.rows.items()) for p in range(len(row.tokens))]
                ),
                min_size=1,
                max_size=12,
            )
        )
        indices = np.array([self.batch.req_id_to_index[req_id] for req_id, _ in pairs])
        positions = np.array([position for _, position in pairs])
        slots = self.batch.block_table.compute_slot_mapping(indices, positions)
        size = self.block_size
        assert slots.tolist() == [
            self.rows[req_id].block_ids[position // size] * size + position % size
            for req_id, position in pairs
        ]

    # ---- what always holds -----------------------------------------------------------------------

    @invariant()
    def rows_are_dense(self) -> None:
        """Rows 0 to num_reqs - 1 are in use and no other; names and rows map to each other."""
        batch = self.batch
        assert set(batch.req_ids) == set(self.rows)
        assert batch.num_reqs == len(batch.req_ids) == len(self.rows)
        assert batch.req_id_to_index == {req_id: i for i, req_id in enumerate(batch.req_ids)}

    @invariant()
    def a_row_holds_its_requests_tokens(self) -> None:
        """Tokens, prompt length and computed tokens are those of the request in the row."""
        for i, req_id in enumerate(self.batch.req_ids):
            row = self.rows[req_id]
            n = self.batch.num_tokens_no_spec[i]
            assert self.batch.token_ids_cpu[i, :n].tolist() == row.tokens
            assert self.batch.num_prompt_tokens[i] == row.num_prompt_tokens
            assert self.batch.num_computed_tokens_cpu[i] == row.num_computed_tokens
            assert self.batch.req_output_token_ids[i] is row.output_token_ids

    @invariant()
    def a_row_holds_its_requests_block_table(self) -> None:
        """The block table follows its request when rows are condensed."""
        table = self.batch.block_table
        for i, req_id in enumerate(self.batch.req_ids):
            n = table.num_blocks_per_row[i]
            assert table.block_table.np[i, :n].tolist() == self.rows[req_id].block_ids

    @invariant()
    def a_row_samples_with_its_requests_parameters(self) -> None:
        """Temperature, top-p, top-k, penalties and seed follow their request."""
        batch = self.batch
        for i, req_id in enumerate(batch.req_ids):
            params = self.rows[req_id].params
            assert batch.temperature.np[i] == np.float32(params.temperature)
            assert batch.top_p.np[i] == np.float32(params.top_p)
            assert batch.top_k.np[i] == (params.top_k or VOCAB_SIZE)
            assert batch.presence_penalties.np[i] == np.float32(params.presence_penalty)
            assert batch.repetition_penalties.np[i] == np.float32(params.repetition_penalty)
            assert batch.seeds.np[i] == (-1 if params.seed is None else params.seed)
            assert batch.num_logprobs.get(req_id) == params.logprobs
            assert batch.bad_words_token_ids.get(i) == params.bad_words_token_ids

    @invariant()
    def a_row_forbids_what_its_request_forbids(self) -> None:
        """The mask of allowed tokens follows its request, and a free row forbids nothing."""
        buffer = self.batch.allowed_token_ids_mask
        if buffer is None:
            assert not any(row.params.allowed_token_ids for row in self.rows.values())
            return
        for i in range(MAX_NUM_REQS):
            used = i < len(self.rows)
            allowed = self.rows[self.batch.req_ids[i]].params.allowed_token_ids if used else None
            forbidden = set(range(VOCAB_SIZE)) - set(allowed) if allowed else set()
            assert set(np.flatnonzero(buffer.np[i]).tolist()) == forbidden

    @invariant()
    def logits_processors_know_the_rows(self) -> None:
        """min_p, logit_bias and min_tokens apply to the rows of the requests that ask for them."""
        params = [self.rows[req_id].params for req_id in self.batch.req_ids]
        outputs = [self.rows[req_id].output_token_ids for req_id in self.batch.req_ids]
        for processor in self.batch.logitsprocs.all:
            if isinstance(processor, MinPLogitsProcessor):
                assert processor.min_p_cpu[: len(params)].tolist() == [p.min_p for p in params]
            if isinstance(processor, LogitBiasLogitsProcessor):
                assert processor.biases == {
                    i: p.logit_bias for i, p in enumerate(params) if p.logit_bias
                }
            if isinstance(processor, MinTokensLogitsProcessor):
                short = {i for i, p in enumerate(params) if len(outputs[i]) < p.min_tokens}
                assert set(processor.min_toks) == short
                assert all(processor.min_toks[i][1] is outputs[i] for i in short)

    @invariant()
    def the_sampler_is_told_of_the_rows_as_they_are(self) -> None:
        """sampling_metadata has one row a request, in row order, or says that none needs it."""
        metadata, params = (
            self.batch.sampling_metadata,
            [self.rows[req_id].params for req_id in self.batch.req_ids],
        )
        temperatures = [p.temperature for p in params]
        assert metadata.all_greedy == (not any(temperatures))
        if not metadata.all_greedy:
            assert metadata.temperature is not None
            assert metadata.temperature.tolist() == temperatures
        if any(p.seed is not None for p in params):
            assert metadata.seeds is not None
            expected = [-1 if p.seed is None else p.seed for p in params]
            assert metadata.seeds.tolist() == expected
        else:
            assert metadata.seeds is None
        penalties = any(p.presence_penalty or p.repetition_penalty != 1 for p in params)
        assert metadata.no_penalties == (not penalties)
        if penalties or any(p.bad_words_token_ids for p in params):
            owned = [self.rows[req_id].output_token_ids for req_id in self.batch.req_ids]
            assert all(a is b for a, b in zip(metadata.output_token_ids, owned, strict=True))

    def teardown(self) -> None:
        """Prefer programs in which rows move."""
        if hasattr(self, "num_moves"):
            target(float(self.num_moves), label="rows moved")


TestBatch = Batch.TestCase
TestBatch.settings = ci_examples(60)
