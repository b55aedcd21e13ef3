"""One streamed request to an OpenAI-compatible endpoint, with the clock running.

        send            chunk 1     chunk 2   chunk 3      usage, [DONE]
    -----+-----------------+-----------+---------+---------------+----> time.perf_counter
         |------ ttft -----|--itl[0]---|--itl[1]-|
         |--------------- latency ---------------|

A chunk counts when it holds a choice, with or without text. What follows the last of them (usage,
[DONE]) is not waited for in `latency`. A chunk may hold several tokens, so `itl` is between chunks.

The client needs the CPU, too: about 0.1 ms a chunk with httpx on the machine where this was written
(0.04 ms in vLLM, with aiohttp). Give it a core of its own, and mistrust it at some thousand chunks
a second.

Upstream: vllm/benchmarks/lib/endpoint_request_func.py (0.23.0)
Left out: other protocols, audio, images, beam search. Ours: an error inside a stream fails the
request (upstream takes no notice of it), and a refusal is reported with the server's own words.
"""

from __future__ import annotations

import codecs
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class RequestFuncInput:
    """What to ask for. `prompt_len` and `output_len` are in tokens; `prompt_len` is replaced by
    what the server's usage says."""

    prompt: str
    api_url: str
    prompt_len: int
    output_len: int
    model: str
    logprobs: int | None = None
    extra_headers: dict[str, str] | None = None
    extra_body: dict[str, Any] | None = None
    ignore_eos: bool = False
    request_id: str | None = None


@dataclass
class RequestFuncOutput:
    """What came of it; times in seconds.

    Attributes:
        output_tokens: as the server's usage says; 0 if it says nothing.
        start_time: time.perf_counter() at the sending.
        error: why it failed; empty after success.
    """

    generated_text: str = ""
    success: bool = False
    latency: float = 0.0
    output_tokens: int = 0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    prompt_len: int = 0
    error: str = ""
    start_time: float = 0.0


RequestFunc = Callable[[RequestFuncInput, httpx.AsyncClient], Awaitable[RequestFuncOutput]]


class StreamedResponseHandler:
    """Bytes of a server-sent event stream in, the events' data out.

    Network chunks end anywhere, even inside a character. An event ends with an empty line; its
    lines may end in LF or CR LF. Comments (pings) have no data and are dropped.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._buffer = ""
        self._data: list[str] = []

    def add_chunk(self, chunk: bytes) -> list[str]:
        """The data of all events that `chunk` completes."""
        *lines, self._buffer = (self._buffer + self._decoder.decode(chunk)).split("\n")
        messages = (self._add_line(line.removesuffix("\r")) for line in lines)
        return [message for message in messages if message is not None]

    def finish(self) -> list[str]:
        """The data of an event that the stream broke off in."""
        return self.add_chunk(b"\n\n")

    def _add_line(self, line: str) -> str | None:
        if not line and self._data:
            message, self._data = "\n".join(self._data), []
            return message
        if line.startswith("data:"):
            self._data.append(line.removeprefix("data:").removeprefix(" "))
        return None


async def async_request_openai_completions(
    request_func_input: RequestFuncInput, client: httpx.AsyncClient
) -> RequestFuncOutput:
    """Stream from /v1/completions."""
    payload = {
        "prompt": request_func_input.prompt,
        "repetition_penalty": 1.0,
        "max_tokens": request_func_input.output_len,
        "logprobs": request_func_input.logprobs,
    }
    return await _request(request_func_input, client, payload, _completion_text)


async def async_request_openai_chat_completions(
    request_func_input: RequestFuncInput, client: httpx.AsyncClient
) -> RequestFuncOutput:
    """Stream from /v1/chat/completions; the prompt is the user's one message."""
    payload = {
        "messages": [{"role": "user", "content": request_func_input.prompt}],
        "max_completion_tokens": request_func_input.output_len,
    }
    return await _request(request_func_input, client, payload, _chat_text)


ASYNC_REQUEST_FUNCS: dict[str, RequestFunc] = {
    "openai": async_request_openai_completions,
    "vllm": async_request_openai_completions,
    "openai-chat": async_request_openai_chat_completions,
}


def _completion_text(choice: dict[str, Any]) -> str:
    return choice.get("text") or ""


def _chat_text(choice: dict[str, Any]) -> str:
    return choice.get("delta", {}).get("content") or ""


async def _request(
    request_func_input: RequestFuncInput,
    client: httpx.AsyncClient,
    payload: dict[str, Any],
    text_of: Callable[[dict[str, Any]], str],
) -> RequestFuncOutput:
    """Send `payload` and read the stream. Never raises: a failure is an output that says so."""
    payload |= {
        "model": request_func_input.model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request_func_input.ignore_eos:
        payload["ignore_eos"] = True
    payload |= request_func_input.extra_body or {}
    headers = make_headers(request_func_input.extra_headers)
    if request_func_input.request_id:
        headers["x-request-id"] = request_func_input.request_id

    output = RequestFuncOutput(prompt_len=request_func_input.prompt_len)
    output.start_time = time.perf_counter()
    try:
        async with client.stream(
            "POST", request_func_input.api_url, json=payload, headers=headers
        ) as response:
            if response.status_code != 200:
                output.error = describe_refusal(response.status_code, await response.aread())
                return output
            await _read_stream(response, output, text_of)
    except Exception as e:  # whatever it is, the other requests go on
        output.error = f"{type(e).__name__}: {e}"
        return output
    if not output.error and output.latency == 0.0:
        output.error = "the stream ended without a token"
    output.success = not output.error
    return output


async def _read_stream(
    response: httpx.Response,
    output: RequestFuncOutput,
    text_of: Callable[[dict[str, Any]], str],
) -> None:
    handler = StreamedResponseHandler()
    async for chunk in response.aiter_bytes():
        for message in handler.add_chunk(chunk):
            _take_in(message, output, text_of)
    for message in handler.finish():
        _take_in(message, output, text_of)


def _take_in(
    message: str, output: RequestFuncOutput, text_of: Callable[[dict[str, Any]], str]
) -> None:
    """Note one event and its moment."""
    if message == "[DONE]":
        return
    data = json.loads(message)
    if error := data.get("error"):
        output.error = f"error in the stream: {error.get('message', error)}"
        return
    if choices := data.get("choices"):
        elapsed = time.perf_counter() - output.start_time
        if output.latency == 0.0:
            output.ttft = elapsed
        else:
            output.itl.append(elapsed - output.latency)
        output.latency = elapsed
        output.generated_text += text_of(choices[0])
    if usage := data.get("usage"):
        output.output_tokens = usage.get("completion_tokens") or 0
        output.prompt_len = usage.get("prompt_tokens") or output.prompt_len


def make_headers(extra_headers: dict[str, str] | None = None) -> dict[str, str]:
    """The key in $OPENAI_API_KEY, if there is one, and what the user adds."""
    headers = {}
    if api_key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {api_key}"
    return headers | (extra_headers or {})


def describe_refusal(status_code: int, body: bytes) -> str:
    """The status, and the message in OpenAI's error object if the body is one."""
    try:
        error = json.loads(body)["error"]
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode("utf-8", errors="replace").strip()
    return f"HTTP {status_code}: {message}"
