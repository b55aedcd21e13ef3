"""StepTraces against expectations that do not come from the tracer."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.exceptions import VLLMValidationError
from nanovllm.trace import StepTrace, Trace, Tracer, trace
from nanovllm.trace.run import request_name
from tests.trace.trace_scenario import (
    ARRIVALS,
    BLOCK_SIZE,
    PROMPTS,
    expected_lines,
    make_llm,
    make_params,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "hash": {},
    "radix": {"prefix_cache_backend": "radix"},
    "async": {"async_scheduling": True},
    "async radix": {"async_scheduling": True, "prefix_cache_backend": "radix"},
    "no cache": {"enable_prefix_caching": False},
    "one request at a time": {"max_num_seqs": 1},
    "priority": {"scheduling_policy": "priority"},
}


def run_scenario(llm: LLM, **kwargs: Any) -> Trace:
    return trace(llm, PROMPTS, make_params(), arrivals=ARRIVALS, **kwargs)


@pytest.fixture(scope="module", params=SETTINGS)
def run(request: pytest.FixtureRequest, trace_model: Path) -> Trace:
    """The scenario under every setting."""
    return run_scenario(make_llm(trace_model, **SETTINGS[request.param]))


@pytest.fixture(scope="module", params=[name for name in SETTINGS if "async" not in name])
def sync_run(request: pytest.FixtureRequest, trace_model: Path) -> Trace:
    """Under the settings where a step ends before the next one begins."""
    return run_scenario(make_llm(trace_model, **SETTINGS[request.param]))


# ---- the scenario worked out by hand ----


def test_the_scenario_goes_as_worked_out_by_hand(trace_model: Path) -> None:
    lines = []
    for step in run_scenario(make_llm(trace_model)):
        shares = (f"{r.request_id} {r.num_scheduled_tokens}" for r in step.scheduled.requests)
        lines.append(f"{step.step}: {', '.join(shares)}")
        for event in step.events:
            blocks = " ".join(map(str, event.block_ids))
            lines.append(f"   {event.kind} {event.request_id} {blocks} ({event.num_tokens} tokens)")
    assert lines == expected_lines()


def test_the_pool_of_the_preempting_step_as_worked_out_by_hand(trace_model: Path) -> None:
    """Step 10: A holds 1 2 3 5 7; B's 6 and 4 are free, its tail first in line, both cached."""
    pool = run_scenario(make_llm(trace_model))[9].pool
    held = {b.block_id: b.held_by for b in pool.blocks if b.held_by}
    assert held == {i: ["A"] for i in (1, 2, 3, 5, 7)}
    assert {b.block_id: b.free_position for b in pool.blocks if b.free_position is not None} == {
        6: 0,
        4: 1,
    }
    states = [b.state for b in pool.blocks]
    assert states == ["null", "held", "held", "held", "cached", "held", "cached", "held"]
    assert (pool.num_free, pool.num_held, pool.num_cached) == (2, 5, 2)
    assert pool.usage == pytest.approx(5 / 7)


def test_statuses_and_queues_through_a_preemption(trace_model: Path) -> None:
    step = run_scenario(make_llm(trace_model))[9]
    before, after = step.before.find("B"), step.after.find("B")
    assert before is not None
    assert after is not None
    assert (before.status, before.num_computed_tokens, before.num_output_tokens) == (
        "RUNNING",
        16,
        7,
    )
    assert (after.status, after.num_computed_tokens, after.num_preemptions) == ("PREEMPTED", 0, 1)
    assert [r.request_id for r in step.after.waiting] == ["B"]
    assert step.scheduled.preempted_req_ids == ["B"]


def test_batch_of_the_step_with_a_hit_as_worked_out_by_hand(trace_model: Path) -> None:
    """Step 3: A's position 10 in block 3, B's positions 8 and 9 in block 4."""
    run = run_scenario(make_llm(trace_model))
    batch, first = run[2].batch, run[1].sampled[0].token_ids
    assert batch is not None
    assert batch.req_ids == ["A", "B"]
    assert batch.input_ids == [*first, 50, 51]
    assert batch.positions == [10, 8, 9]
    assert batch.slot_mapping == [3 * 4 + 2, 4 * 4, 4 * 4 + 1]
    assert batch.query_start_loc == [0, 1, 3]
    assert batch.seq_lens == [11, 10]
    assert batch.samples == [True, True]
    assert run[0].batch is not None
    assert run[0].batch.samples == [False], "a chunk samples nothing"


def test_several_preempted_in_one_step_are_told_in_order(trace_model: Path) -> None:
    """A's third chunk needs two blocks, C and B give one each, the last admitted first."""
    llm = make_llm(
        trace_model,
        num_gpu_blocks_override=7,
        max_model_len=24,
        max_num_batched_tokens=14,
        long_prefill_token_threshold=8,
        scheduler_reserve_full_isl=False,
    )
    prompts = [{"prompt_token_ids": list(range(i, i + n))} for i, n in ((10, 22), (40, 3), (50, 3))]
    step = trace(llm, prompts, [make_params(max_tokens=n) for n in (2, 4, 4)])[2]
    assert step.scheduled.preempted_req_ids == ["C", "B"]
    events = [(e.kind, e.request_id, e.block_ids) for e in step.events if e.kind != "store"]
    assert events == [
        ("preempt", "C", [4]),
        ("preempt", "B", [3]),
        ("evict", "A", [4]),
        ("evict", "A", [3]),
        ("allocate", "A", [4, 3]),
    ]
    assert [r.request_id for r in step.after.waiting] == ["B", "C"]


# ---- what holds of every step, under every setting ----


def test_every_block_is_accounted_for(run: Trace) -> None:
    """Null, free or referred to, and by whom: block tables and tree add up to the ref counts."""
    for step in run:
        pool = step.pool
        assert [b.block_id for b in pool.blocks] == list(range(pool.num_blocks))
        assert [b.block_id for b in pool.blocks if b.is_null] == [0]
        for block in pool.blocks[1:]:
            assert block.ref_cnt == len(block.held_by) + block.in_tree
            assert (block.free_position is not None) == (block.ref_cnt == 0)
        positions = sorted(b.free_position for b in pool.blocks if b.free_position is not None)
        assert positions == list(range(pool.num_free))
        assert pool.num_held == sum(bool(b.held_by) for b in pool.blocks)
        assert pool.usage == pytest.approx(pool.num_held / (pool.num_blocks - 1))


def test_block_tables_agree_with_the_pool(run: Trace) -> None:
    for step in run:
        for request in step.scheduled.requests:
            held = [b.block_id for b in step.pool.blocks if request.request_id in b.held_by]
            assert sorted(request.block_ids) == held
            assert set(request.new_block_ids) <= set(held)


def test_scheduled_tokens_add_up(run: Trace) -> None:
    for step in run:
        shares = [r.num_scheduled_tokens for r in step.scheduled.requests]
        assert sum(shares) == step.scheduled.total_num_scheduled_tokens
        assert sum(shares) <= step.scheduled.token_budget == 8
        if step.batch is None:
            assert shares == []
            continue
        assert sorted(step.batch.req_ids) == sorted(r.request_id for r in step.scheduled.requests)
        assert step.batch.query_start_loc[-1] == sum(shares) == len(step.batch.input_ids)


def test_the_batch_holds_the_scheduled_tokens_at_their_places(run: Trace) -> None:
    """Tokens, positions and slots follow from prompt, outputs so far and block table."""
    tokens = dict(zip(["A", "B"], (list(p["prompt_token_ids"]) for p in PROMPTS), strict=True))
    for step in run:  # async: a step's tokens are known before the next but one
        for sampled in step.sampled:
            tokens[sampled.request_id] += sampled.token_ids
    for step in run:
        if step.batch is None:
            continue
        scheduled = {r.request_id: r for r in step.scheduled.requests}
        for row, req_id in enumerate(step.batch.req_ids):
            part = slice(*step.batch.query_start_loc[row : row + 2])
            request = scheduled[req_id]
            end = request.start + request.num_scheduled_tokens
            assert step.batch.positions[part] == list(range(request.start, end))
            assert step.batch.seq_lens[row] == end
            assert step.batch.input_ids[part] == tokens[req_id][request.start : end]
            assert step.batch.slot_mapping[part] == [
                request.block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                for p in range(request.start, end)
            ]


def test_rows_that_sample_are_those_with_a_sampled_token(run: Trace) -> None:
    """With async scheduling one more may be computed for a request that has ended meanwhile."""
    for step in run:
        rows = step.batch.req_ids if step.batch is not None else []
        samples = step.batch.samples if step.batch is not None else []
        wanted = {req_id for req_id, sample in zip(rows, samples, strict=True) if sample}
        got = {s.request_id for s in step.sampled}
        assert got == wanted if not run.engine.async_scheduling else got <= wanted


def test_what_a_step_leaves_is_what_the_next_one_finds(sync_run: Trace) -> None:
    """But for new arrivals."""
    for step, following in zip(sync_run, sync_run.steps[1:], strict=False):
        arrived = {r.request_id for r in sync_run.requests if r.arrival_step == following.step}
        assert following.before.running == step.after.running
        assert [r for r in following.before.waiting if r.request_id not in arrived] == (
            step.after.waiting
        )


def test_events_change_the_pool_as_they_say(run: Trace) -> None:
    """Taken blocks are held by their taker, freed ones not by their giver."""
    lag = 2 if run.engine.async_scheduling else 1  # steps planned before an end is known
    for step in run:
        holders = {b.block_id: b.held_by for b in step.pool.blocks}
        later = run.steps[step.step - 1 + lag :][:1]
        for event in step.events:
            for block_id in event.block_ids:
                if event.kind in ("hit", "allocate"):
                    assert event.request_id in holders[block_id]
                elif event.kind == "preempt":
                    assert event.request_id not in holders[block_id]
                elif event.kind == "finish" and later:
                    assert event.request_id not in later[0].pool.blocks[block_id].held_by


def test_stores_and_evictions_add_up_to_what_can_be_found(sync_run: Trace) -> None:
    """Replaying the events gives the blocks that carry a hash, step by step."""
    found: set[int] = set()

    def replay(step: StepTrace, phase: str) -> None:
        for event in step.events:
            if event.phase == phase and event.kind == "store":
                found.update(event.block_ids)
            elif event.phase == phase and event.kind == "evict":
                found.difference_update(event.block_ids)

    for step in sync_run:
        replay(step, "schedule")
        assert found == {b.block_id for b in step.pool.blocks if b.block_hash is not None}
        replay(step, "update")


def test_spans_nest_and_logical_time_counts_their_ends(run: Trace) -> None:
    ticks = []
    for step in run:
        names = [span.name for span in step.spans]
        assert names in (["step"], ["plan", "update step"])
        parts = [child for span in step.spans for child in span.children]
        assert [p.name for p in parts if p.name != "sample"] == ["schedule", "execute", "update"]
        for span in step.spans:
            assert span.start == span.children[0].start
            assert span.end == span.children[-1].end
            assert all(child.start <= child.end for child in span.children)
        for earlier, later in pairwise(parts):
            assert earlier.end <= later.start
            assert earlier.end_tick < later.start_tick
        ticks += [tick for part in parts for tick in (part.start_tick, part.end_tick)]
    assert sorted(ticks) == list(range(1, len(ticks) + 1))


# ---- a trace changes nothing, and costs nothing when there is none ----


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_tokens_with_and_without_a_tracer(name: str, trace_model: Path) -> None:
    """Random, unseeded sampling: one random number more would show."""
    params = make_params(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, presence_penalty=0.5)
    plain = make_llm(trace_model, **SETTINGS[name]).generate(PROMPTS, params, use_tqdm=False)
    run = trace(make_llm(trace_model, **SETTINGS[name]), PROMPTS, params, watch=["A", "B"])
    traced: dict[str, list[int]] = {"A": [], "B": []}
    for step in run:
        for sampled in step.sampled:
            traced[sampled.request_id] += sampled.token_ids
    assert [traced["A"], traced["B"]] == [list(o.outputs[0].token_ids) for o in plain]
    assert [request.text for request in run.requests] == [o.outputs[0].text for o in plain]


def test_what_the_tracer_and_its_reader_do_takes_no_time(trace_model: Path) -> None:
    """The trace's clock stands still meanwhile."""
    run = run_scenario(make_llm(trace_model), on_step=lambda step: time.sleep(0.02))
    gaps = [later.spans[0].start - earlier.spans[0].end for earlier, later in pairwise(run)]
    assert sorted(gaps)[len(gaps) // 2] < 10_000, "microseconds; 20,000 of them asleep"


def test_without_a_tracer_nothing_of_it_runs(trace_model: Path) -> None:
    """No function of nanovllm/trace, no event recorded: before a trace and after one."""
    llm = make_llm(trace_model)
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    files: set[str] = set()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    def generate() -> None:
        sys.setprofile(profile)
        try:
            llm.generate(PROMPTS, make_params(), use_tqdm=False)
        finally:
            sys.setprofile(None)

    for _ in range(2):
        generate()
        assert any("scheduler.py" in name for name in files)
        assert not [name for name in files if "nanovllm/trace" in name or "kv_events" in name]
        assert core._scheduler_and_executor() == (core.scheduler, core.model_executor)
        assert core.scheduler.kv_cache_manager.take_events() == []
        run_scenario(llm)


def test_a_failing_step_ends_the_trace_and_leaves_the_engine_usable(
    trace_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(trace_model)
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]

    def fail(step: StepTrace) -> None:
        raise RuntimeError("seen enough")

    with pytest.raises(RuntimeError, match="seen enough"):
        run_scenario(llm, on_step=fail)
    assert core.tracer is None
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(run_scenario(llm)) == 18


# ---- the interface ----


def test_a_trace_survives_json(run: Trace, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run.save_jsonl(path)
    assert Trace.from_jsonl(path.read_text(encoding="utf-8")) == run
    assert StepTrace.from_dict(run[0].to_dict()) == run[0]


def test_a_trace_of_another_version_or_none_is_refused(run: Trace) -> None:
    with pytest.raises(ValueError, match="version 2, expected 1"):
        Trace.from_jsonl(run.to_jsonl().replace('"version": 1', '"version": 2', 1))
    with pytest.raises(ValueError, match="not a trace"):
        Trace.from_jsonl('{"a": 1}\n')


def test_latencies_by_their_definitions(run: Trace) -> None:
    from nanovllm.trace.latency import latency

    for request in run.requests:
        assert len(request.token_times) == len(request.token_steps) == 12
        times, first = latency(request), request.token_times[0]
        assert times.ttft == pytest.approx((first - request.arrival) / 1e3)
        assert times.e2el is not None
        assert times.tpot == pytest.approx((times.e2el - times.ttft) / 11)
        assert sum(times.itls) == pytest.approx(times.e2el - times.ttft)


def test_samples_of_one_prompt_are_requests_of_their_own(trace_model: Path) -> None:
    run = trace(make_llm(trace_model), "ab", make_params(n=2, temperature=1.0), watch=["A"])
    assert [r.request_id for r in run.requests] == ["0_A", "1_A"]
    assert {s.request_id for step in run for s in step.sampling} == {"0_A", "1_A"}
    assert all(len(r.token_times) == 12 for r in run.requests)


def test_a_request_that_a_stop_text_ends_is_seen_to_end(trace_model: Path) -> None:
    """The front end finds the text after the step, so the next step tells of it."""
    llm = make_llm(trace_model)
    text = llm.generate("ab", make_params(), use_tqdm=False)[0].outputs[0].text
    params = [make_params(stop=[text[1]]), make_params()]
    run = trace(llm, ["ab", "cd"], params)
    ends = [(e.request_id, e.detail) for s in run for e in s.events if e.kind == "finish"]
    assert ends == [("A", "ended by the front end"), ("B", "length")]


def test_large_pools_are_listed_in_part(trace_model: Path) -> None:
    run = run_scenario(make_llm(trace_model, num_gpu_blocks_override=1000))
    for step in run:
        assert len(step.pool.blocks) < 50
        assert step.pool.num_free + step.pool.num_held == 999
        assert {0, 1} <= {b.block_id for b in step.pool.blocks}


def test_mistakes_get_a_sentence(trace_model: Path) -> None:
    llm = make_llm(trace_model)
    with pytest.raises(VLLMValidationError, match="no request 'Z' to watch; there are A, B"):
        trace(llm, PROMPTS, make_params(), watch=["Z"])
    with pytest.raises(VLLMValidationError, match="arrivals must be one number from 0 for each"):
        trace(llm, PROMPTS, make_params(), arrivals=[0])
    with pytest.raises(VLLMValidationError):
        trace(llm, "x" * 500, make_params())
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.engine_core.engine_core.tracer is None  # type: ignore[attr-defined]


def test_requests_are_named_as_columns_of_a_spreadsheet() -> None:
    assert [request_name(i) for i in (0, 1, 25, 26, 51, 52, 702)] == (
        ["A", "B", "Z", "AA", "AZ", "BA", "AAA"]
    )


def test_a_tracer_without_texts() -> None:
    tracer = Tracer()
    assert tracer._token_texts([1, 2]) == []
