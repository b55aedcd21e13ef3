"""Our decisions are those of the recorded systems, and the replay would notice if they were not."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scripts.replay_golden import Mismatch, make_replay, replay_file

GOLDEN = Path(__file__).parents[2] / "golden"
SCHEDULER = GOLDEN / "vllm_scheduler.jsonl"
RADIX = GOLDEN / "sglang_radix_cache.jsonl"


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("trace", load(SCHEDULER), ids=lambda trace: f"seed{trace['seed']}")
def test_scheduler_decides_as_vllm_did(trace: dict[str, Any]) -> None:
    """Every field of every output, in order, block id by block id."""
    assert make_replay(trace).run() == len(trace["ops"])


@pytest.mark.parametrize("trace", load(RADIX), ids=lambda trace: f"seed{trace['seed']}")
def test_radix_cache_answers_as_sglang_did(trace: dict[str, Any]) -> None:
    """Every match, size, eviction and its order."""
    assert make_replay(trace).run() == len(trace["ops"])


def test_the_traces_hold_what_their_readme_says() -> None:
    """A truncated file would pass every test above."""
    traces = load(SCHEDULER)
    ops = [op for trace in traces for op in trace["ops"]]
    schedules = [op["output"] for op in ops if op["op"] == "schedule"]
    assert len(traces) == 48
    assert sum(trace["config"]["async_scheduling"] for trace in traces) == 14
    assert len(ops) == 7827
    assert sum(len(output["preempted"]) for output in schedules) == 91
    first_hits = sum(new["num_computed_tokens"] > 0 for o in schedules for new in o["new"])
    resumed_hits = sum(
        cached["resumed"] and cached["num_computed_tokens"] > 0
        for output in schedules
        for cached in output["cached"]
    )
    assert first_hits + resumed_hits == 246
    assert len(load(RADIX)) == 60


def alterations(output: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One wrong copy of a recorded SchedulerOutput a field."""
    wrong: dict[str, dict[str, Any]] = {}
    if output["new"]:
        wrong["new"] = copy.deepcopy(output)
        wrong["new"]["new"][0]["block_ids"][-1] += 1
    if output["cached"]:
        wrong["cached"] = copy.deepcopy(output)
        wrong["cached"]["cached"][0]["num_computed_tokens"] += 1
    if len(output["num_scheduled_tokens"]) > 1:
        wrong["scheduling order"] = copy.deepcopy(output)
        items = reversed(output["num_scheduled_tokens"].items())
        wrong["scheduling order"]["num_scheduled_tokens"] = dict(items)
    wrong["preempted"] = {**output, "preempted": [*output["preempted"], "nobody"]}
    wrong["finished"] = {**output, "finished": [*output["finished"], "nobody"]}
    wrong["total_num_scheduled_tokens"] = {
        **output,
        "total_num_scheduled_tokens": output["total_num_scheduled_tokens"] + 1,
    }
    return wrong


def test_the_replay_notices_a_change_in_any_field() -> None:
    """Alter one field of one recorded schedule at a time: each is reported, under its name."""
    seen: Counter[str] = Counter()
    for trace in load(SCHEDULER)[:3]:
        for i, op in enumerate(trace["ops"]):
            if op["op"] != "schedule" or i % 7:
                continue
            for field, output in alterations(op["output"]).items():
                altered = {**trace, "ops": [*trace["ops"][:i], {**op, "output": output}]}
                with pytest.raises(Mismatch) as error:
                    make_replay(altered).run()
                assert (error.value.op_index, error.value.field) == (i, field)
                seen[field] += 1
    assert set(seen) == {
        "new", "cached", "scheduling order", "preempted", "finished", "total_num_scheduled_tokens",
    }  # fmt: skip


def test_the_replay_command_reports_and_exits_non_zero(tmp_path: Path) -> None:
    """A mismatch prints seed, operation, expected, got and pool; the rest still counts."""
    trace = load(SCHEDULER)[0]
    update = next(i for i, op in enumerate(trace["ops"]) if op["op"] == "update")
    trace["ops"][update]["num_free_blocks"] = 999
    path = tmp_path / "wrong.jsonl"
    path.write_text(json.dumps(trace) + "\n", encoding="utf-8")
    command = [sys.executable, "scripts/replay_golden.py", str(path), str(RADIX)]
    result = subprocess.run(command, cwd=GOLDEN.parents[1], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "60/61 replayed"
    for text in ("seed 0", f"operation {update} (update)", "expected  999", "got ", "free, next"):
        assert text in result.stdout


def test_every_trace_is_counted() -> None:
    """The command's last line counts what was replayed, not what it opened."""
    assert replay_file(RADIX, stop_at_first=False) == (60, 60)
