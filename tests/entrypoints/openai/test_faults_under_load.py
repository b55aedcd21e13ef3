"""A server process under load: SIGTERM, and an engine process that is killed."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable

import httpx
import psutil
from test_serve_command import LONG, Process

NUM_STREAMS = 8


def _under_load(process: Process, fault: Callable[[], None]) -> list[list[str]]:
    """The events of some streams; the fault comes once all of them have begun."""
    results: list[list[str]] = [[] for _ in range(NUM_STREAMS)]

    def read(events: list[str]) -> None:
        with httpx.stream("POST", f"{process.url}/v1/completions", json=LONG, timeout=60) as r:
            assert r.status_code == 200
            for line in r.iter_lines():
                if line:
                    events.append(line)

    threads = [threading.Thread(target=read, args=(events,)) for events in results]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while not all(results):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    fault()
    for thread in threads:
        thread.join(60)
    return results


def test_sigterm_under_load_lets_every_stream_end() -> None:
    process = Process()
    try:
        results = _under_load(process, lambda: process.process.send_signal(signal.SIGTERM))
        for events in results:
            assert events[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in events[-2]
        assert process.wait() == 0
    finally:
        process.close()


def test_a_killed_engine_process_is_told_to_every_stream_and_ends_the_server() -> None:
    process = Process("--engine-client", "mp")
    try:

        def kill() -> None:
            children = psutil.Process(process.process.pid).children()
            (engine,) = [c for c in children if any("spawn_main" in arg for arg in c.cmdline())]
            engine.kill()

        for events in _under_load(process, kill):
            assert events[-1] == "data: [DONE]"
            assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 503
        assert process.wait() != 0
    finally:
        process.close()
