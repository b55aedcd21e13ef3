"""A server of one's own making, for clients under test: it listens on a real socket.

It speaks enough of HTTP/1.1 to be streamed from. What it answers is a test's business:

    async def handler(request):
        return json_response({"data": [...]})           # a whole answer
        return stream(0.05, chunk("a"), 0.02, chunk("b"), DONE)   # numbers are pauses in seconds
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

DONE = b"data: [DONE]\n\n"
BREAK = object()  # in a stream: the connection is dropped here


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Response:
    status: int
    content_type: str
    parts: list[Any]  # bytes, seconds to wait, BREAK


def json_response(value: Any, status: int = 200) -> Response:
    return Response(status, "application/json", [json.dumps(value).encode()])


def stream(*parts: Any) -> Response:
    return Response(200, "text/event-stream", list(parts))


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def chunk(text: str, finish_reason: str | None = None) -> bytes:
    """A chunk of /v1/completions."""
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return event({"choices": [choice], "usage": None})


def chat_chunk(text: str | None, **delta: Any) -> bytes:
    """A chunk of /v1/chat/completions."""
    if text is not None:
        delta["content"] = text
    return event({"choices": [{"index": 0, "delta": delta}]})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": counts})


Handler = Callable[[Request], Awaitable[Response]]


class FakeServer:
    """Runs in a thread; `with FakeServer(handler) as server:` then `server.url`.

    `requests` holds all that came; `max_concurrent` how many were being answered at once.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[Request] = []
        self.max_concurrent = 0
        self._concurrent = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=512)
        port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            pairs = (line.split(": ", 1) for line in head[1:] if line)
            headers = {name.lower(): value for name, value in pairs}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            request = Request(method, path, headers, body)
            self.requests.append(request)
            self._concurrent += 1
            self.max_concurrent = max(self.max_concurrent, self._concurrent)
            try:
                await self._answer(await self._handler(request), writer)
            finally:
                self._concurrent -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _answer(self, response: Response, writer: asyncio.StreamWriter) -> None:
        writer.write(
            f"HTTP/1.1 {response.status} X\r\nContent-Type: {response.content_type}\r\n"
            "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
        )
        for part in response.parts:
            if part is BREAK:
                writer.transport.abort()
                return
            if isinstance(part, bytes):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
            else:
                await asyncio.sleep(part)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
