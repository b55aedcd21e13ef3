"""A trace as Chrome JSON, which https://ui.perfetto.dev and chrome://tracing show as a timeline.

    process "engine"     one track of nested slices: step > schedule, execute, sample, update
                         counters: KV-cache blocks, tokens of the batch, requests
    process "requests"   one track a request: waiting, running, preempted, from arrival to the last
                         token; an instant for every token

Slices (X) must nest within their track, so requests, which overlap, are async events (b, e) that
belong together by category and id. Times are microseconds, begun when the trace was.
"""

from __future__ import annotations

import json
from typing import Any

from nanovllm.trace.step_trace import RequestInfo, Span, StepTrace, Trace

ENGINE_PID, REQUESTS_PID, ENGINE_TID = 1, 2, 1
JsonDict = dict[str, Any]


def to_perfetto(trace: Trace) -> str:
    return json.dumps(
        {
            "traceEvents": make_events(trace),
            "displayTimeUnit": "ms",
            "otherData": {"model": trace.engine.model, "version": trace.version},
        },
        ensure_ascii=False,
    )


def make_events(trace: Trace) -> list[JsonDict]:
    """The events, in order of time."""
    events: list[JsonDict] = []
    for step in trace:
        for span in step.spans:
            events += _slices(span, step)
        events += _counters(step)
    for request in trace.requests:
        events += _lifetime(request, trace)
    # A stable sort: of events at one time, ends come before what begins, outer before inner.
    events.sort(key=lambda event: event["ts"])
    return [
        _metadata("process_name", ENGINE_PID, "engine"),
        _metadata("thread_name", ENGINE_PID, "steps"),
        _metadata("process_name", REQUESTS_PID, "requests"),
        *events,
    ]


def _metadata(name: str, pid: int, value: str) -> JsonDict:
    return {
        "name": name,
        "ph": "M",
        "pid": pid,
        "tid": ENGINE_TID,
        "ts": 0,
        "args": {"name": value},
    }


def _slices(span: Span, step: StepTrace) -> list[JsonDict]:
    """The span, then what it consists of."""
    is_whole = bool(span.children)
    args: JsonDict = {"step": step.step}
    if is_whole:
        args["tokens"] = {r.request_id: r.num_scheduled_tokens for r in step.scheduled.requests}
        args["events"] = [f"{e.kind} {e.request_id or ''} {e.block_ids}" for e in step.events]
    event = {
        "name": f"{span.name} {step.step}" if is_whole else span.name,
        "cat": "step",
        "ph": "X",
        "ts": span.start,
        "dur": span.duration,
        "pid": ENGINE_PID,
        "tid": ENGINE_TID,
        "args": args,
    }
    return [event, *(child for part in span.children for child in _slices(part, step))]


def _counters(step: StepTrace) -> list[JsonDict]:
    """As they stand when the step has been planned."""
    ts = step.span("schedule").end
    tokens = {r.request_id: r.num_scheduled_tokens for r in step.scheduled.requests}
    running = {r.request_id for r in step.before.running}
    running = (running | set(tokens)) - set(step.scheduled.preempted_req_ids)
    known = {r.request_id for r in step.before.running + step.before.waiting}
    values: dict[str, JsonDict] = {
        "KV-cache blocks": {"held": step.pool.num_held, "cached": step.pool.num_cached},
        "KV-cache usage, %": {"usage": round(step.pool.usage * 100, 2)},
        "batch tokens": {"tokens": step.scheduled.total_num_scheduled_tokens},
        "requests": {"running": len(running), "waiting": len(known - running)},
    }
    return [
        {"name": name, "ph": "C", "ts": ts, "pid": ENGINE_PID, "tid": ENGINE_TID, "args": args}
        for name, args in values.items()
    ]


def phases(request: RequestInfo, trace: Trace) -> list[tuple[str, float, float]]:
    """(waiting, running or preempted; begin; end) in order, without gaps, in microseconds."""
    changes = [("waiting", request.arrival)]
    for step in trace:
        ts = step.span("schedule").end
        kinds = {r.request_id: r.kind for r in step.scheduled.requests}
        if kinds.get(request.request_id) in ("new", "resumed"):
            changes.append(("running", ts))
        elif request.request_id in step.scheduled.preempted_req_ids:
            changes.append(("preempted", ts))
    last = max([*request.token_times[-1:], changes[-1][1]])
    ends = [ts for _, ts in changes[1:]] + [last]
    return [(name, begin, end) for (name, begin), end in zip(changes, ends, strict=True)]


def _lifetime(request: RequestInfo, trace: Trace) -> list[JsonDict]:
    """The request as a whole, and its phases within."""
    common = {
        "cat": "request",
        "id": request.request_id,
        "pid": REQUESTS_PID,
        "tid": ENGINE_TID,
    }
    parts = phases(request, trace)
    name = f"request {request.request_id}"
    args = {"prompt": request.prompt, "text": request.text, "finish": request.finish_reason}
    events = [{"name": name, "ph": "b", "ts": parts[0][1], **common, "args": args}]
    for phase, begin, end in parts:
        events.append({"name": phase, "ph": "b", "ts": begin, **common, "args": {}})
        inside = [t for t in request.token_times if begin < t <= end]
        events += [{"name": "token", "ph": "n", "ts": t, **common, "args": {}} for t in inside]
        events.append({"name": phase, "ph": "e", "ts": end, **common, "args": {}})
    return [*events, {"name": name, "ph": "e", "ts": parts[-1][2], **common, "args": {}}]
