"""A real server for tests: uvicorn in a thread, on a port that the system has chosen."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import httpx

from nanovllm import EngineArgs
from nanovllm.entrypoints.openai.api_server import (
    build_app,
    create_server_socket,
    init_app_state,
    make_server,
)
from nanovllm.entrypoints.openai.cli_args import FrontendArgs
from nanovllm.v1.engine.async_llm import AsyncLLM

MODEL = "tiny-stories"
TIMEOUT = 90.0


class LiveServer:
    """Use it as a context manager. `http` is a client of it without a key."""

    def __init__(self, engine_args: dict[str, Any] | None = None, **frontend_args: Any) -> None:
        args = FrontendArgs(uvicorn_log_level="warning", **frontend_args)
        self.engine = AsyncLLM.from_engine_args(
            EngineArgs(device="cpu", num_gpu_blocks_override=400, **engine_args or {})
        )
        self.app = build_app(args)
        init_app_state(self.engine, self.app, args)
        self._socket = create_server_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.server = make_server(self.app, args)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve(sockets=[self._socket])

    def __enter__(self) -> LiveServer:
        self._socket.listen()  # so that the first request waits instead of failing
        self.thread.start()
        assert self.http.get("/health").status_code == 200
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(TIMEOUT)
        self.engine.shutdown()
        assert not self.thread.is_alive()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str, labels: str = "") -> float:
        """The value of a metric as /metrics has it."""
        text = self.http.get("/metrics").text
        lines = re.findall(rf"^{re.escape(name)}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
        (value,) = [float(v) for found, v in lines if labels in found and 'engine="0"' in found]
        return value

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT)

    def wait_until_idle(self) -> None:
        """Return once nothing is left of any request; fail if that does not come about."""

        async def wait() -> None:
            async with asyncio.timeout(TIMEOUT):
                while not await self.engine.is_idle() or self.app.state.admission.num_admitted:
                    await asyncio.sleep(0.01)

        self.call(wait())
        # Only possible when no request holds a block.
        assert self.post("/reset_prefix_cache").status_code == 200
        block_pool = self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        assert block_pool.get_num_free_blocks() == block_pool.num_gpu_blocks - 1
