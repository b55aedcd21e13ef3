"""What surrounds the routes: keys, body sizes, errors as OpenAI's object, clients that go away.

Upstream: vllm/entrypoints/serve/utils/{server_utils,api_utils}.py (0.23.0)
Left out: X-Request-Id response headers, logging of responses. Upstream asks for a key under /v1
only; here everywhere but at /health, /version and /metrics. The limit of a body's size is ours.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers

from nanovllm.entrypoints.openai.error_response import (
    RequestTooLargeError,
    create_error_response,
)
from nanovllm.entrypoints.openai.serving_engine import EventStream
from nanovllm.exceptions import VLLMNotFoundError, VLLMValidationError
from nanovllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

UNGUARDED_PATHS = ("/health", "/version", "/metrics")
# How many of the mistakes in one body are named.
MAX_NAMED_ERRORS = 3


def error_json(
    error: str | Exception,
    status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """The response for an exception, or a message."""
    response = create_error_response(error, status_code, param)
    return JSONResponse(response.model_dump(), response.error.code, headers=headers)


# ---- middleware ----


class AuthenticationMiddleware:
    """Lets through what bears one of the keys, as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, tokens: list[str]) -> None:
        self.app = app
        self.api_tokens = [hashlib.sha256(token.encode()).digest() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_free(scope) or self._verify_token(scope):
            await self.app(scope, receive, send)
            return
        response = error_json(
            "this server needs an API key: send it as 'Authorization: Bearer KEY'.",
            HTTPStatus.UNAUTHORIZED,
            headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
        await response(scope, receive, send)

    def _is_free(self, scope: Scope) -> bool:
        return scope["method"] == "OPTIONS" or scope["path"].rstrip("/") in UNGUARDED_PATHS

    def _verify_token(self, scope: Scope) -> bool:
        scheme, _, token = Headers(scope=scope).get("Authorization", "").partition(" ")
        # Digests are of equal length, and all are compared: the time taken tells nothing.
        digest = hashlib.sha256(token.encode()).digest()
        matches = [secrets.compare_digest(digest, known) for known in self.api_tokens]
        return scheme.lower() == "bearer" and any(matches)


class RequestSizeMiddleware:
    """Stops reading a body once it is longer than allowed; a declared length is enough."""

    def __init__(self, app: ASGIApp, max_request_size: int) -> None:
        self.app = app
        self.max_request_size = max_request_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > self.max_request_size:
            await self._refuse(scope, receive, send)
            return
        num_received = 0

        async def counting_receive() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self.max_request_size:
                raise _BodyTooLong
            return message

        try:
            await self.app(scope, counting_receive, send)
        except _BodyTooLong:
            # No handler answers before it has the whole body.
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = RequestTooLargeError(
            f"the request's body is longer than max_request_size={self.max_request_size} bytes."
        )
        # What is left of the body is not read, so nothing can follow on this connection.
        await error_json(error, headers={"Connection": "close"})(scope, receive, send)


class _BodyTooLong(BaseException):
    """Passes through FastAPI, which makes a 400 of every Exception while a body is read."""


# ---- responses ----


class EventStreamResponse(StreamingResponse):
    """Server-sent events; closes its stream however the response ends, begun or not."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__(
            stream.events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.aclose()


async def run_unless_disconnected(raw_request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled if the client goes away first.

    Starlette watches the client only while it streams. Returns an empty response in that case,
    which nobody reads.
    """
    work_task = asyncio.ensure_future(work)
    watch_task = asyncio.ensure_future(_disconnected(raw_request))
    try:
        await asyncio.wait((work_task, watch_task), return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        return Response(status_code=499)
    finally:
        for task in (work_task, watch_task):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(raw_request: Request) -> None:
    while (await raw_request.receive())["type"] != "http.disconnect":
        pass


# ---- exceptions ----


async def validate_json_request(raw_request: Request) -> None:
    """Refuse a body that does not say that it is JSON.

    A web page may send other types to a server on this machine without asking; curl's default is
    one of them.
    """
    content_type = raw_request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body must be JSON and say so: 'Content-Type: application/json'.",
        )


async def validation_exception_handler(_: Request, exc: RequestValidationError) -> JSONResponse:
    """A body that is not JSON or has a field of the wrong type: one sentence, naming the field."""
    errors = exc.errors()
    named = [_describe(error) for error in errors[:MAX_NAMED_ERRORS]]
    param = _field_of(errors[0]) if errors else None
    return error_json("; ".join(dict.fromkeys(named)) + ".", param=param)


def _field_of(error: dict[str, Any]) -> str | None:
    location = [part for part in error["loc"] if part not in ("body", "query", "path")]
    return str(location[0]) if location and isinstance(location[0], str) else None


def _describe(error: dict[str, Any]) -> str:
    if error["type"] == "json_invalid":
        reason = error.get("ctx", {}).get("error", "")
        return f"the body is not JSON: {reason}, at character {error['loc'][-1]}"
    field = _field_of(error)
    return f"{field or 'the body'}: {error['msg']}"


async def http_exception_handler(_: Request, exc: HTTPException) -> JSONResponse:
    """No such path, no such method, a body that cannot be read."""
    status_code = HTTPStatus(exc.status_code)
    return error_json(str(exc.detail), status_code, headers=dict(exc.headers or {}))


async def exception_handler(raw_request: Request, exc: Exception) -> JSONResponse:
    """Everything else. What is not the client's mistake is logged with its traceback."""
    if isinstance(exc, EngineDeadError):
        raw_request.app.state.on_engine_dead()
    elif create_error_response(exc).error.code >= 500:
        logger.error("A request failed.", exc_info=exc)
    return error_json(exc)


EXCEPTION_HANDLERS: dict[Any, Callable[..., Any]] = {
    RequestValidationError: validation_exception_handler,
    VLLMValidationError: exception_handler,
    VLLMNotFoundError: exception_handler,
}
