"""The README's curl commands, run as they stand there against a live server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from live_server import LiveServer

README = Path(__file__).resolve().parents[3] / "README.md"
ADDRESS = "http://127.0.0.1:8000"
COMMANDS = re.findall(r"```bash\n(curl .*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_shows_each_kind_of_request() -> None:
    paths = [command.partition(ADDRESS)[2].split()[0] for command in COMMANDS]
    assert paths == ["/v1/completions", "/v1/chat/completions", "/metrics"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[-1][:20])
def test_curl(server: LiveServer, command: str) -> None:
    result = subprocess.run(
        command.replace(ADDRESS, server.url).replace("curl ", "curl -sS --fail-with-body ", 1),
        shell=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if "/metrics" in command:
        assert "\nvllm:num_requests_running{" in result.stdout
    elif '"stream": true' in command:
        *events, done = [line for line in result.stdout.splitlines() if line]
        assert done == "data: [DONE]"
        deltas = [json.loads(e.removeprefix("data: "))["choices"][0]["delta"] for e in events]
        assert len("".join(delta.get("content") or "" for delta in deltas)) > 20
    else:
        assert len(json.loads(result.stdout)["choices"][0]["text"]) > 20
