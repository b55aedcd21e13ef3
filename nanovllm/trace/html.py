"""A trace as one HTML page: no network, no library, light and dark.

Everything that needs thought (latencies, phases) is worked out here and handed to the page as JSON;
the script in page.html only draws.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from nanovllm.trace.latency import latency
from nanovllm.trace.perfetto import phases
from nanovllm.trace.step_trace import RequestInfo, Trace

TEMPLATE = Path(__file__).with_name("page.html")


def to_html(trace: Trace) -> str:
    data = {
        "engine": asdict(trace.engine),
        "requests": [_request(request, trace) for request in trace.requests],
        "steps": [step.to_dict() for step in trace],
    }
    # Inside a script element "</" could end it, and "<!--" begin a comment.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    title = escape(f"nanovllm trace: {trace.engine.model}")
    page = TEMPLATE.read_text(encoding="utf-8")
    return page.replace("%TITLE%", title).replace("%DATA%", text)


def _request(request: RequestInfo, trace: Trace) -> dict[str, Any]:
    """RequestInfo with phases, latencies in milliseconds, cached tokens and preemptions."""
    scheduled = [r for s in trace for r in s.scheduled.requests]
    mine = [r for r in scheduled if r.request_id == request.request_id]
    times = latency(request)
    preempted = [i for s in trace for i in s.scheduled.preempted_req_ids]
    return {
        **asdict(request),
        "phases": phases(request, trace),
        "latency": asdict(times) | {"median_itl": times.median_itl, "max_itl": times.max_itl},
        "num_cached_tokens": mine[0].num_cached_tokens if mine else 0,
        "num_preemptions": preempted.count(request.request_id),
    }
