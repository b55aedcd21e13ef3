"""What the views show: text, Perfetto, HTML."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from nanovllm.trace import Trace, trace
from nanovllm.trace.html import to_html
from nanovllm.trace.perfetto import make_events, to_perfetto
from nanovllm.trace.text import TraceView, ranges
from tests.trace.trace_scenario import ARRIVALS, PROMPTS, make_llm, make_params

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def take(folder: Path, **engine_args: Any) -> Trace:
    params = make_params(temperature=0.8, top_k=20, top_p=0.9, seed=1)
    llm = make_llm(folder, **engine_args)
    return trace(llm, PROMPTS, params, arrivals=ARRIVALS, watch=["A"])


@pytest.fixture(scope="module")
def run(trace_model: Path) -> Trace:
    return take(trace_model)


@pytest.fixture(scope="module", params=["sync", "async", "radix"])
def any_run(request: pytest.FixtureRequest, trace_model: Path) -> Trace:
    backend = "radix" if request.param == "radix" else "hash"
    return take(
        trace_model, async_scheduling=request.param == "async", prefix_cache_backend=backend
    )


def render(run: Trace, width: int = 100, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        highlight=False,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
    )
    TraceView(console).print_trace(run)
    return console.file.getvalue()  # type: ignore[attr-defined]


def step_text(run: Trace, number: int) -> str:
    (text,) = (
        part
        for part in re.split(r"^(?=step )", render(run), flags=re.M)
        if part.startswith(f"step {number} ")
    )
    return text


# ---- text ----


def test_no_line_is_wider_than_100_columns(any_run: Trace) -> None:
    assert max(cell_len(line) for line in render(any_run).splitlines()) <= 100
    narrow = render(any_run, width=80)
    assert max(cell_len(line) for line in narrow.splitlines()) <= 80


def test_without_colour_the_same_characters(run: Trace) -> None:
    plain, colourful = render(run), render(run, colour=True)
    assert "\x1b" not in plain
    assert "\x1b[" in colourful
    assert ESCAPE.sub("", colourful) == plain


def test_the_budget_is_split_by_request(run: Trace) -> None:
    assert re.search(r"budget +AAAAAAAA  8 of 8 tokens \(A 8\)", step_text(run, 1))
    assert re.search(r"budget +ABB·····  3 of 8 tokens \(A 1, B 2\)", step_text(run, 3))


def test_the_pool_shows_holders_contents_and_the_free_queue(run: Trace) -> None:
    """Step 3: 1 and 2 are shared, both can be found; 3 is A's and not full, 4 is new."""
    text = step_text(run, 3)
    assert re.search(r"0 ##   2\*   2\*   A    B \+  ·    ·    ·", text)
    assert "free queue: 5 6 7" in text
    text = step_text(run, 10)
    assert re.search(r"0 ##   A\*   A\*   A\*   c    A\*   c    A ", text)
    assert "free queue: 6c 4c" in text


def test_events_are_named(run: Trace) -> None:
    assert re.search(r"hit +B +8 tokens found in blocks 1-2 \(shared with A\)", step_text(run, 3))
    assert re.search(
        r"preempt +B +back to the queue; blocks 1-2 4 6 and 16 tokens", step_text(run, 10)
    )
    assert re.search(r"evict +A +block 6 forgotten: 4 tokens", step_text(run, 13))
    assert re.search(r"finish +A +length, blocks 1-3 5 7 6 given back", step_text(run, 13))
    assert re.search(r"B +running → preempted +░+ +0/17", step_text(run, 10))
    assert re.search(r"B +preempted → running .* 5 tokens, 12 from the cache", step_text(run, 14))


def test_the_batch_shows_tokens_with_their_places(run: Trace) -> None:
    text = step_text(run, 1)
    assert "8 tokens in 1 row, query_start_loc [0, 8], seq_lens [8]" in text
    assert "positions 0-7, slots 4-11: a chunk, its sample is dropped" in text
    assert text.count("│") == 9, "eight tokens between nine bars"
    assert re.search(r"sampled +nothing", text)


def test_the_distribution_marks_the_sampled_token(run: Trace) -> None:
    text = step_text(run, 2)
    assert re.search(r"model +temperature +top_k +top_p", text)
    assert re.search(r"T = 0.8 +k = 20 +p = 0.9", text)
    assert text.count('→ "') == 1
    assert re.search(r"tokens left +260 +260 +20 +\d+", text)


def test_the_summary_has_latencies_and_texts(run: Trace) -> None:
    text = render(run).split("requests ─")[1]
    assert re.search(r"A +step 1 +10 +12( +\d+\.\d){5}", text)
    assert re.search(r"B +step 3 +10 +12( +\d+\.\d){5}", text)
    assert text.count("[length]") == 2


def test_numbers_in_a_row_become_ranges() -> None:
    assert ranges([1, 2, 3, 7, 9, 10, 4]) == "1-3 7 9-10 4"
    assert ranges([]) == ""


# ---- Perfetto ----


def test_perfetto_events_have_the_keys_they_need(any_run: Trace) -> None:
    data = json.loads(to_perfetto(any_run))
    keys = {"X": {"dur", "cat"}, "b": {"id", "cat"}, "e": {"id", "cat"}, "n": {"id", "cat"}}
    for event in data["traceEvents"]:
        assert {"name", "ph", "ts", "pid", "tid", "args"} <= event.keys()
        assert keys.get(event["ph"], set()) <= event.keys()
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int | float) for value in event["args"].values())
    assert {event["ph"] for event in data["traceEvents"]} == {"M", "X", "C", "b", "e", "n"}


def test_slices_of_a_track_nest(any_run: Trace) -> None:
    """Each begins after the one before has ended, or lies within it."""
    tracks: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for event in make_events(any_run):
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            tracks[event["pid"], event["tid"]].append((event["ts"], end, event["name"]))
    assert tracks
    for slices in tracks.values():
        stack: list[tuple[float, float, str]] = []
        depths = set()
        for begin, end, name in slices:  # in the file's order, outer before inner
            while stack and stack[-1][1] <= begin:
                stack.pop()
            if stack:
                assert end <= stack[-1][1] + 1e-3, f"{name} leaves {stack[-1][2]}"
            stack.append((begin, end, name))
            depths.add(len(stack))
        assert depths == {1, 2}


def test_requests_begin_and_end_once_and_their_phases_lie_within(any_run: Trace) -> None:
    by_id: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in make_events(any_run):
        if event["ph"] in "ben":
            by_id[event["id"]].append(event)
    assert by_id.keys() == {"A", "B"}
    for req_id, events in by_id.items():
        stack, seen = [], []
        for event in events:
            if event["ph"] == "b":
                stack.append(event["name"])
                seen.append(event["name"])
            elif event["ph"] == "e":
                assert stack.pop() == event["name"]
            else:
                # async: a step under way when its request was preempted
                where = "running" if not any_run.engine.async_scheduling else stack[-1]
                assert stack == [f"request {req_id}", where]
        assert stack == []
        assert sum(event["ph"] == "n" for event in events) == 12, "one a token"
        assert [events[0]["name"], events[-1]["name"]] == [f"request {req_id}"] * 2
        assert seen[:3] == [f"request {req_id}", "waiting", "running"]


def test_counters_follow_the_steps(run: Trace) -> None:
    events = make_events(run)
    tokens = [e["args"]["tokens"] for e in events if e["ph"] == "C" and e["name"] == "batch tokens"]
    assert tokens == [8, 2, 3, *[2] * 6, *[1] * 4, 5, *[1] * 4]
    blocks = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "KV-cache blocks"]
    assert blocks[9] == {"held": 5, "cached": 2}
    requests = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "requests"]
    assert requests[9] == {"running": 1, "waiting": 1}


# ---- HTML ----


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found.group(1))


def test_the_page_carries_the_whole_trace_and_loads_nothing(run: Trace) -> None:
    page = to_html(run)
    data = data_of(page)
    assert data["steps"] == [step.to_dict() for step in run]
    assert data["requests"][1]["num_preemptions"] == 1
    assert data["requests"][1]["num_cached_tokens"] == 8
    assert [name for name, _, _ in data["requests"][1]["phases"]] == [
        "waiting",
        "running",
        "preempted",
        "running",
    ]
    assert not re.search(r"""(src|href)\s*=|@import|url\(|fetch\(|https?:""", page)


def test_texts_cannot_leave_their_script_element(trace_model: Path) -> None:
    nasty = "</script><!--<b>"
    page = to_html(trace(make_llm(trace_model), nasty, make_params(max_tokens=1)))
    assert data_of(page)["requests"][0]["prompt"] == nasty
    assert page.count("</script>") == 2


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_page_draws_itself_in_a_browser(any_run: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.html"
    path.write_text(to_html(any_run), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [*command, "--enable-logging=stderr", f"{path.as_uri()}#3"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "Uncaught" not in done.stderr
    page = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.S)
    assert page.count('<tr class="step') == len(any_run)
    assert page.count("<svg") == 3
    detail = page.split('id="detail"')[1].split("<h2>")[0]
    assert "step 3" in detail
    assert detail.count('class="cell ') == 8
    assert "found in block" in detail
