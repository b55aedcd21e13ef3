"""How long each request of a trace took, by the definitions of vLLM's `bench serve`.

    TTFT   arrival to first token
    ITL    the gap between one token and the next
    TPOT   (E2EL - TTFT) / (output tokens - 1): the mean of the gaps
    E2EL   arrival to last token

On the trace's clock, which stands still while the tracer works; a token is there when its step's
result has been taken in. Detokenizing and whatever lies between client and engine are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from nanovllm.trace.step_trace import RequestInfo


@dataclass
class Latency:
    """Milliseconds. None: the request has not so many tokens."""

    ttft: float | None
    tpot: float | None
    itls: list[float]
    e2el: float | None

    @property
    def median_itl(self) -> float | None:
        return median(self.itls) if self.itls else None

    @property
    def max_itl(self) -> float | None:
        return max(self.itls, default=None)


def latency(request: RequestInfo) -> Latency:
    times = [(time - request.arrival) / 1e3 for time in request.token_times]
    if not times:
        return Latency(None, None, [], None)
    itls = [later - earlier for earlier, later in pairwise(times)]
    tpot = (times[-1] - times[0]) / len(itls) if itls else None
    return Latency(times[0], tpot, itls, times[-1])
