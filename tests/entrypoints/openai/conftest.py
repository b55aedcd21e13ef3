"""One server for all tests that only ask it something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from live_server import LiveServer

from nanovllm import LLM


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    with LiveServer(enable_prompt_tokens_details=True) as server:
        yield server


@pytest.fixture
def server(live: LiveServer) -> Iterator[LiveServer]:
    """The server, which must be left as it was found: without a request or a block in use."""
    yield live
    live.wait_until_idle()


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model offline, for what the answers should be."""
    return LLM(device="cpu", num_gpu_blocks_override=400)
