"""The registry that a Prometheus logger fills, and the text a scrape of it gets.

Every logger has a registry of its own, so that two engines in one process do not share counters;
upstream fills prometheus_client's global one and empties it first.

Upstream: vllm/v1/metrics/prometheus.py (0.23.0)
Left out: several server processes behind one port (PROMETHEUS_MULTIPROC_DIR).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def get_prometheus_registry() -> CollectorRegistry:
    """A new registry that already reports on the process: memory, CPU, files, Python, its gc."""
    from prometheus_client import (
        CollectorRegistry,
        GCCollector,
        PlatformCollector,
        ProcessCollector,
    )

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """What `GET /metrics` answers: the body and its content type."""
    from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
