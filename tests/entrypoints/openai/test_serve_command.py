"""`nanovllm serve` as a process: its messages, its end, its log."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[3]
LONG = {"prompt": "Once upon", "max_tokens": 200, "ignore_eos": True, "stream": True}


class Process:
    """A server process; `lines` is what it has said so far."""

    def __init__(self, *args: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nanovllm", "serve", "--port", "0", "--device", "cpu", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.search(r"Serving (\S+) on (http://\S+)", line):
                self.model, self.url = match.groups()
                break
        else:
            raise AssertionError("".join(self.lines))
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout))
        self._reader.start()
        # No retries: from that line on the server listens.
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(30)
        self._reader.join(30)
        return code

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


@pytest.fixture
def serve() -> Iterator[type[Process]]:
    processes: list[Process] = []

    def start(*args: str) -> Process:
        processes.append(Process(*args))
        return processes[-1]

    yield start  # type: ignore[misc]
    for process in processes:
        process.close()


def test_sigterm_lets_running_requests_end_and_a_log_without_prompts(
    serve: type[Process],
) -> None:
    process = serve()
    assert process.model == "tiny-stories"
    for _ in range(2):
        body = {"prompt": "a very private prompt", "max_tokens": 1, "no_such_field": "private too"}
        assert process.http.post("/v1/completions", json=body).status_code == 200
    bad = process.http.post("/v1/completions", json=body | {"stop": ["private stop", 1]})
    assert bad.status_code == 400
    with process.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        process.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{process.url}/health", timeout=5)
    assert rest[-1] == "data: [DONE]"
    assert len(rest) > 100
    assert '"finish_reason":"length"' in rest[-2]
    assert process.wait() == 0
    log = "".join(process.lines)
    assert "private" not in log
    assert log.count("no_such_field") == 1
    assert '"POST /v1/completions HTTP/1.1" 200' in log
    assert "Traceback" not in log


def test_what_does_not_end_in_time_is_cut_off(serve: type[Process]) -> None:
    process = serve(
        "--shutdown-timeout", "0", "--enable-log-requests", "--disable-uvicorn-access-log"
    )

    def read_to_the_end() -> None:
        body = LONG | {"max_tokens": 900}
        with process.http.stream("POST", "/v1/completions", json=body) as response:
            for i, _ in enumerate(response.iter_lines()):
                if i == 0:
                    process.process.send_signal(signal.SIGTERM)

    with pytest.raises(httpx.RemoteProtocolError):
        read_to_the_end()
    assert process.wait() == 0
    log = "".join(process.lines)
    # What was asked for with --enable-log-requests.
    assert "prompt: 'Once upon'" in log
    assert "max_tokens=900" in log
    assert "POST /v1/completions" not in log


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanovllm", "serve", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def test_a_port_in_use_is_named_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = _run("--port", str(port))
    assert result.returncode == 2
    assert f"127.0.0.1:{port} cannot be listened on" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["no-such-model", "--port", "0"], "no-such-model"),
        (["a", "--model", "b"], "two models"),
        (["--port", "99999"], "99999"),
        (["--max-num-waiting", "-1"], "max_num_waiting"),
        (["--max-request-size", "0"], "max_request_size"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout"),
        (["--chat-template", "no-such-file", "--port", "0"], "no-such-file"),
    ],
)
def test_mistakes_on_the_command_line(
    args: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from nanovllm.entrypoints.cli.main import main

    assert main(["serve", *args]) == 2
    assert part in capsys.readouterr().err
