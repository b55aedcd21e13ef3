"""Every mistake a client can make gets OpenAI's error object, the right status and its name."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from live_server import MODEL, LiveServer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
JSON = {"Content-Type": "application/json"}


def check_error(response: httpx.Response, status: int, *parts: str) -> dict[str, Any]:
    """The error object, once it is what it should be."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["type"]
    assert 0 < len(error["message"]) < 1100
    for part in parts:
        assert part in error["message"]
    return error


# (fields beside prompt or messages, the field that is named, a part of the message)
BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "non-negative"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": [1]}, "temperature", "number"),
    ({"temperature": 1e300}, "temperature", "finite"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_p": 1.1}, "top_p", "(0, 1]"),
    ({"top_k": -5}, "top_k", "top_k"),
    ({"top_k": 1.5}, "top_k", "integer"),
    ({"min_p": 2}, "min_p", "[0, 1]"),
    ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
    ({"frequency_penalty": -3}, "frequency_penalty", "[-2, 2]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than zero"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 10**9}, "n", "at most"),
    ({"n": 2, "temperature": 0}, "n", "greedy"),
    ({"seed": 2**63}, "seed", "9223372036854775807"),
    ({"seed": "x"}, "seed", "integer"),
    ({"max_tokens": -1}, "max_tokens", "at least 1"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 10**30}, "max_tokens", "max_model_len is 1024"),
    ({"max_tokens": 1024}, "max_tokens", "max_model_len is 1024"),
    ({"max_tokens": "many"}, "max_tokens", "integer"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens=3"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": 5}, "stop", "string"),
    ({"stop": ["a", 5]}, "stop", "string"),
    ({"stop": [f"stop {i}" for i in range(5000)]}, "stop", "at most 256"),
    ({"stop": ["\ud800"]}, "stop", "Unicode"),
    ({"bad_words": ["x"] * 5000}, "bad_words", "at most 256"),
    ({"stop_token_ids": [3072]}, "stop_token_ids", "vocabulary"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "greater than or equal to 0"),
    ({"stop_token_ids": ["x"] * 100_000}, "stop_token_ids", "integer"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"allowed_token_ids": [10**12]}, "allowed_token_ids", "vocabulary"),
    ({"logit_bias": {"9999": 1}}, "logit_bias", "vocabulary"),
    ({"logit_bias": {"cat": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "number"),
    ({"logit_bias": [1]}, "logit_bias", "dictionary"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "non-negative"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "max_logprobs=20"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": "perhaps"}, "stream", "boolean"),
    ({"cache_salt": ""}, "cache_salt", "non-empty"),
    ({"cache_salt": 7}, "cache_salt", "string"),
    ({"priority": 1}, "priority", "--scheduling-policy priority"),
    ({"priority": 2**70}, "priority", "9223372036854775807"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "not supported"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "not supported"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
    ({"model": 5}, "model", "string"),
    ({"request_id": "x" * 1000}, "request_id", "128"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("fields", "param", "part"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named(
    live: LiveServer, path: str, fields: dict[str, Any], param: str, part: str
) -> None:
    base = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": HI}
    # (Not json=, which refuses NaN and surrogates itself.)
    response = live.http.post(path, content=json.dumps(base | fields), headers=JSON)
    error = check_error(response, 400, part)
    assert error["param"] == param


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", '"nan"', "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_numbers_that_are_none(live: LiveServer, field: str, number: str) -> None:
    body = f'{{"prompt": "Hi", "{field}": {number}}}'
    error = check_error(live.http.post(COMPLETIONS, content=body, headers=JSON), 400, "finite")
    assert error["param"] == field


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({}, "must be given"),
        ({"prompt": None}, "must be given"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": []}, "not empty"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": ["Hi", ""]}, "empty"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "Hi"}}, "prompt"),
        ({"prompt": ["Hi", 5]}, "prompt"),
        ({"prompt": [1, "x"] * 100_000}, "prompt"),
        ({"prompt": [-1]}, "greater than or equal to 0"),
        ({"prompt": [3072]}, "vocabulary"),
        ({"prompt": [10**40]}, "vocabulary"),
        ({"prompt": [5] * 1024}, "max_model_len 1024"),
        ({"prompt": "dog " * 1100}, "max_model_len 1024"),
        ({"prompt": "x" * 1_000_000}, "1000000 characters"),
        ({"prompt": [5] * 1020}, "the prompt has 1020 tokens and max_tokens asks for 16"),
        ({"prompt": "\udc80"}, "Unicode"),
        ({"prompt": "Hi", "logprobs": -1}, "non-negative"),
        ({"prompt": "Hi", "logprobs": 21}, "max_logprobs=20"),
        ({"prompt": "Hi", "logprobs": "all"}, "integer"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_prompts(live: LiveServer, fields: dict[str, Any], part: str) -> None:
    for stream in (False, True):
        body = json.dumps({"stream": stream} | fields)
        check_error(live.http.post(COMPLETIONS, content=body, headers=JSON), 400, part)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({}, "required"),
        ({"messages": []}, "non-empty"),
        ({"messages": "Hi"}, "list"),
        ({"messages": ["Hi"]}, "dictionary"),
        ({"messages": [{"content": "Hi"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        ({"messages": [{"role": 5, "content": "Hi"}]}, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "text parts",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "Unicode"),
        ({"messages": [{"role": "user", "content": "dog " * 1100}]}, "max_model_len 1024"),
        ({"messages": [{"role": "user", "content": "x" * 500_000}]}, "characters"),
        ({"messages": HI, "top_logprobs": 2}, "logprobs=true"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "max_logprobs=20"),
        ({"messages": HI, "logprobs": True, "top_logprobs": -2}, "non-negative"),
        ({"messages": HI, "continue_final_message": True}, "exclude each other"),
        ({"messages": HI, "chat_template": "{{ 1 }}"}, "--trust-request-chat-template"),
        ({"messages": HI, "chat_template": "/etc/passwd"}, "--trust-request-chat-template"),
        ({"messages": HI, "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"messages": HI, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"messages": HI, "chat_template_kwargs": {"messages": 5}}, "chat template"),
        ({"messages": HI, "max_completion_tokens": 5000}, "max_model_len is 1024"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_chats(live: LiveServer, fields: dict[str, Any], part: str) -> None:
    for stream in (False, True):
        body = json.dumps({"stream": stream} | fields)
        check_error(live.http.post(CHAT, content=body, headers=JSON), 400, part)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"Hi",
        b"null",
        b"[]",
        b'"Hi"',
        b'{"prompt": "Hi",}',
        b'{"prompt": "\xff\xfe"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"prompt": "Hi", "seed": ' + b"9" * 10_000 + b"}",
        b"\x00" * 100,
    ],
    ids=lambda body: str(body[:20]),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_request(live: LiveServer, path: str, body: bytes) -> None:
    check_error(live.http.post(path, content=body, headers=JSON), 400)


def test_a_body_must_say_that_it_is_json(live: LiveServer) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}):
        response = live.http.post(COMPLETIONS, content=b'{"prompt": "Hi"}', headers=headers)
        check_error(response, 415, "Content-Type: application/json")
    charset = {"Content-Type": "application/json; charset=utf-8"}
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    assert live.http.post(COMPLETIONS, content=body, headers=charset).status_code == 200


def test_unknown_models_paths_and_methods(live: LiveServer) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "Hi", "max_tokens": 1}),
        (CHAT, {"messages": HI, "max_tokens": 1}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        error = check_error(live.post(path, model="gpt-4", **body), 404, "gpt-4", MODEL)
        assert error["type"] == "NotFoundError"
        assert live.post(path, model=MODEL, **body).status_code == 200
    # Half of a surrogate pair cannot be sent back as it is.
    body = '{"prompt": "Hi", "model": "\\ud800"}'
    check_error(live.http.post(COMPLETIONS, content=body, headers=JSON), 404, "\\ud800")
    check_error(live.http.get("/v1/models/gpt-4"), 404, "gpt-4")
    check_error(live.http.get("/v2/completions"), 404)
    response = live.http.get(COMPLETIONS)
    check_error(response, 405)
    assert response.headers["allow"] == "POST"


def test_unknown_fields_are_ignored_and_named_once(
    live: LiveServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("nanovllm"), "propagate", True)
    with caplog.at_level("WARNING", logger="nanovllm"):
        for _ in range(3):
            response = live.post(COMPLETIONS, prompt="Hi", max_tokens=1, best_of_all="secret words")
            assert response.status_code == 200
    lines = [record.message for record in caplog.records if "best_of_all" in record.message]
    assert len(lines) == 1
    assert "secret words" not in caplog.text


# ---- size ----


@pytest.fixture(scope="module")
def small() -> Any:
    with LiveServer(
        max_request_size=2000,
        api_key=["secret", "other"],
        max_num_waiting=1,
        engine_args={
            "max_num_seqs": 2,
            "served_model_name": "my-model",
            "scheduling_policy": "priority",
        },
    ) as server:
        yield server


KEY = {"Authorization": "Bearer secret"}


def test_a_body_over_the_limit_is_refused(small: LiveServer) -> None:
    body = json.dumps({"prompt": "x" * 3000}).encode()
    check_error(small.http.post(COMPLETIONS, content=body, headers=JSON | KEY), 413, "2000 bytes")

    def in_pieces() -> Any:
        for start in range(0, len(body), 500):
            yield body[start : start + 500]

    # Without a Content-Length, it is found out while it is read.
    response = small.http.post(COMPLETIONS, content=in_pieces(), headers=JSON | KEY)
    check_error(response, 413, "2000 bytes")
    fits = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
    assert small.http.post(COMPLETIONS, content=fits, headers=JSON | KEY).status_code == 200


# ---- keys ----


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Bearer secret2"},
        {"Authorization": b"Bearer \xff"},
    ],
    ids=str,
)
def test_a_key_is_needed_but_to_see_how_the_server_is(small: LiveServer, headers: Any) -> None:
    for method, path in (
        ("POST", COMPLETIONS),
        ("POST", CHAT),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/openapi.json"),
        ("GET", "/health/../v1/models"),
    ):
        response = small.http.request(method, path, headers=headers)
        check_error(response, 401, "API key")
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/version", "/metrics"):
        assert small.http.get(path).status_code == 200


def test_every_key_is_accepted(small: LiveServer) -> None:
    for key in ("secret", "other"):
        for scheme in ("Bearer", "bearer"):
            response = small.http.get("/v1/models", headers={"Authorization": f"{scheme} {key}"})
            assert response.json()["data"][0]["id"] == "my-model"


# ---- the queue ----


def test_requests_beyond_the_queue_are_refused_until_others_have_ended(small: LiveServer) -> None:
    # Two run and one may wait.
    long = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=small.url, headers=KEY, timeout=30) as client:
        check_error(client.post(COMPLETIONS, json=long | {"n": 4}), 429, "max_num_waiting is 1")
        check_error(client.post(COMPLETIONS, json=long | {"prompt": ["a"] * 4}), 429)
        with (
            client.stream("POST", COMPLETIONS, json=long | {"n": 2}) as first,
            client.stream("POST", COMPLETIONS, json=long) as second,
        ):
            assert (first.status_code, second.status_code) == (200, 200)
            for stream in (False, True):
                body = {"prompt": "Hi", "max_tokens": 1, "stream": stream}
                check_error(client.post(COMPLETIONS, json=body), 429, "the queue is full")
                body = {"messages": HI, "max_tokens": 1, "stream": stream}
                check_error(client.post(CHAT, json=body), 429, "the queue is full")
            # Looking at a prompt takes no place.
            assert client.post(f"{COMPLETIONS}/render", json={"prompt": "Hi"}).status_code == 200
        small.http.headers.update(KEY)
        small.wait_until_idle()
        assert client.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 1}).status_code == 200


def test_priority_is_accepted_where_the_policy_is_priority(small: LiveServer) -> None:
    body = {"prompt": "Hi", "max_tokens": 1, "priority": -3}
    response = small.http.post(COMPLETIONS, json=body, headers=KEY)
    assert response.status_code == 200
    assert response.json()["model"] == "my-model"


# ---- clients that go away, or never read ----


def _raw_request(server: LiveServer, **body: Any) -> socket.socket:
    """A connection on which a request has been sent and nothing is read."""
    content = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    sock.sendall(head.encode() + content)
    return sock


def _wait_for_admitted(server: LiveServer, number: int) -> None:
    deadline = time.monotonic() + 20
    while server.app.state.admission.num_admitted != number:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_request(server: LiveServer, stream: bool) -> None:
    before = server.metric("vllm:generation_tokens_total")
    sock = _raw_request(server, prompt="Once", max_tokens=1000, ignore_eos=True, stream=stream, n=3)
    _wait_for_admitted(server, 3)
    if stream:
        assert sock.recv(20).startswith(b"HTTP/1.1 200")
    sock.close()
    server.wait_until_idle()
    assert server.metric("vllm:generation_tokens_total") - before < 2500


def test_a_client_that_goes_away_before_its_body_has_come(server: LiveServer) -> None:
    sock = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'Content-Length: 100\r\n\r\n{"prompt"'
    )
    sock.close()
    assert server.post(COMPLETIONS, prompt="Hi", max_tokens=1).status_code == 200


def test_a_client_that_never_reads_holds_up_nobody(server: LiveServer) -> None:
    # Logprobs make the stream longer than what the sockets' buffers hold.
    lazy = _raw_request(
        server, prompt="Once", max_tokens=1000, ignore_eos=True, stream=True, logprobs=20
    )
    try:
        _wait_for_admitted(server, 1)
        for _ in range(3):
            response = server.post(COMPLETIONS, prompt="Hi", max_tokens=5)
            assert response.status_code == 200
    finally:
        lazy.close()


def test_a_closed_stream_of_several_prompts_frees_all_of_them(server: LiveServer) -> None:
    body = {"prompt": ["Once", "A cat", "The"], "max_tokens": 1000, "ignore_eos": True}
    with server.http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line:
                break
    server.wait_until_idle()


# ---- an engine that fails ----


def test_a_dead_engine_is_told_to_everyone_and_ends_the_server() -> None:
    with LiveServer() as server:
        answers: list[Any] = []

        def ask(stream: bool) -> None:
            body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": stream}
            answers.append(httpx.post(server.url + COMPLETIONS, json=body, timeout=30))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        _wait_for_admitted(server, 2)

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("the machine is on fire")

        server.engine.engine_core.engine_core.model_executor.execute_model = fail
        for thread in threads:
            thread.join(20)
        answers.sort(key=lambda answer: answer.status_code)
        streamed, whole = answers
        check_error(whole, 503, "on fire")
        assert streamed.status_code == 200
        last, done = streamed.text.strip().split("\n\n")[-2:]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503
        assert done == "data: [DONE]"
        server.thread.join(20)
        assert not server.thread.is_alive()
        assert server.app.state.admission.num_admitted == 0
