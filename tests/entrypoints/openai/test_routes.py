"""The routes around generation: rendered prompts, tokens, metrics, the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from live_server import MODEL, LiveServer

import nanovllm
from nanovllm import LLM
from nanovllm.entrypoints.openai.error_response import QueueFullError, create_error_response
from nanovllm.entrypoints.openai.serving_engine import AdmissionControl, merge_async_iterators

HI = [{"role": "user", "content": "Hi"}]


# ---- what a prompt becomes ----


def test_render_shows_what_the_engine_would_get(server: LiveServer, llm: LLM) -> None:
    chat = server.post("/v1/chat/completions/render", messages=HI, max_tokens=7, seed=5).json()
    expected = llm.preprocess_chat(HI)
    assert chat["prompt"] == expected["prompt"] == "".join(chat["token_strs"])
    assert chat["prompt"].endswith("<|im_start|>assistant\n")
    assert chat["token_ids"] == expected["prompt_token_ids"]
    assert chat["sampling_params"]["max_tokens"] == 7
    assert chat["sampling_params"]["seed"] == 5
    assert chat["model"] == MODEL

    prompts = ["Once upon a time", "The cat"]
    rendered = server.post("/v1/completions/render", prompt=prompts, temperature=0.5).json()
    ids = [llm.get_tokenizer().encode(prompt) for prompt in prompts]
    assert [one["prompt"] for one in rendered] == prompts
    assert [one["token_ids"] for one in rendered] == ids
    assert rendered[0]["sampling_params"]["temperature"] == 0.5
    assert rendered[0]["sampling_params"]["max_tokens"] == 16
    response = server.post("/v1/completions", prompt=prompts[0], max_tokens=1)
    assert response.json()["usage"]["prompt_tokens"] == len(rendered[0]["token_ids"])


def test_render_refuses_what_the_engine_would(server: LiveServer) -> None:
    response = server.post("/v1/chat/completions/render", messages=HI, temperature=-1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


def test_tokens_there_and_back(server: LiveServer, llm: LLM) -> None:
    text = "Once upon a time, there was a café <|im_end|> 🐕."
    tokens = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert tokens["tokens"] == llm.get_tokenizer().encode(text)
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 1024
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    assert server.post("/detokenize", tokens=[]).json() == {"prompt": ""}

    chat = server.post("/tokenize", messages=HI).json()
    assert chat["tokens"] == llm.preprocess_chat(HI)["prompt_token_ids"]
    assert chat["token_strs"] is None
    without = server.post("/tokenize", messages=HI, add_generation_prompt=False).json()
    assert chat["tokens"][: without["count"]] == without["tokens"] != chat["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "Hi", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "Hi"}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_bad_tokens(live: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    response = live.post(path, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


# ---- the server itself ----


def test_version_and_health(server: LiveServer) -> None:
    assert server.http.get("/version").json() == {"version": nanovllm.__version__}
    health = server.http.get("/health")
    assert (health.status_code, health.content) == (200, b"")


def test_metrics_count_what_was_served(server: LiveServer) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    assert server.http.get("/metrics").headers["content-type"].startswith("text/plain")
    before = [server.metric(name) for name in names]
    ended = 'finished_reason="length"'
    num_ended = server.metric("vllm:request_success_total", ended)
    body = {"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True}
    usage = server.post("/v1/completions", **body).json()["usage"]
    after = [server.metric(name) for name in names]
    assert after[0] - before[0] == usage["prompt_tokens"]
    assert after[1] - before[1] == usage["completion_tokens"] == 5
    assert server.metric("vllm:request_success_total", ended) == num_ended + 1
    assert server.metric("vllm:num_requests_running", f'model_name="{MODEL}"') == 0


def test_the_prefix_cache_is_forgotten_but_not_under_a_request(server: LiveServer) -> None:
    body = {"prompt": "There was a little dog who liked to run in the park. " * 2, "max_tokens": 1}

    def cached_tokens() -> int:
        usage = server.post("/v1/completions", **body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached_tokens()
    assert cached_tokens() >= 16
    assert server.post("/reset_prefix_cache").status_code == 200
    assert cached_tokens() == 0
    long = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=long) as response:
        lines = response.iter_lines()  # (The stream is closed when nobody holds this.)
        next(lines)
        refused = server.post("/reset_prefix_cache")
        assert refused.status_code == 409
        assert "running" in refused.json()["error"]["message"]


def test_the_clients_own_id_is_part_of_the_responses(server: LiveServer) -> None:
    body = {"prompt": "Hi", "max_tokens": 1}
    for _ in range(2):  # twice the same is no error
        response = server.http.post(
            "/v1/completions", json=body, headers={"X-Request-Id": "my-request"}
        )
        assert response.json()["id"] == "cmpl-my-request"
    response = server.post("/v1/completions", **body, request_id="of-the-body")
    assert response.json()["id"] == "cmpl-of-the-body"
    unusable = server.http.post(
        "/v1/completions", json=body, headers={"X-Request-Id": "x" * 500}
    ).json()["id"]
    assert len(unusable) < 50


def test_a_stream_says_that_it_is_one_and_ends_with_done(server: LiveServer) -> None:
    response = server.post("/v1/completions", prompt="Hi", max_tokens=2, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-2])


def test_the_description_names_every_route(server: LiveServer) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/completions/render",
        "/v1/chat/completions/render",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/version",
        "/metrics",
        "/reset_prefix_cache",
    } <= set(paths)


# ---- parts ----


def test_places_in_the_queue_are_given_back_once() -> None:
    control = AdmissionControl(max_num_seqs=2, max_num_waiting=1)
    first = control.admit(2)
    second = control.admit(1)
    with pytest.raises(QueueFullError, match="max_num_waiting is 1"):
        control.admit(1)
    assert control.num_admitted == 3
    second.release()
    second.release()
    assert control.num_admitted == 2
    first.release()
    assert control.num_admitted == 0
    with pytest.raises(QueueFullError):
        control.admit(4)
    assert AdmissionControl(1, None).admit(10_000)


def test_errors_of_our_own_do_not_quote_the_request() -> None:
    error = create_error_response(RuntimeError("once upon a secret")).error
    assert (error.code, error.type) == (500, "InternalServerError")
    assert "secret" not in error.message


class Items:
    """Generators that note whether they were closed."""

    def __init__(self) -> None:
        self.num_open = 0

    async def count(self, name: str, number: int, *, fail: bool = False) -> AsyncGenerator[Any]:
        self.num_open += 1
        try:
            for i in range(number):
                await asyncio.sleep(0)
                yield f"{name}{i}"
            if fail:
                raise ValueError(name)
        finally:
            self.num_open -= 1


def test_merged_iterators_keep_each_ones_order() -> None:
    async def collect() -> tuple[list[tuple[int, Any]], int]:
        items = Items()
        merged = merge_async_iterators([items.count("a", 3), items.count("b", 5)])
        return [pair async for pair in merged], items.num_open

    pairs, num_open = asyncio.run(collect())
    assert [item for i, item in pairs if i == 0] == ["a0", "a1", "a2"]
    assert [item for i, item in pairs if i == 1] == ["b0", "b1", "b2", "b3", "b4"]
    assert num_open == 0


@pytest.mark.parametrize("number", [1, 2, 3])
def test_merged_iterators_are_closed_with_the_merger_or_by_an_error(number: int) -> None:
    async def close_early() -> int:
        items = Items()
        merged = merge_async_iterators([items.count(str(i), 9) for i in range(number)])
        await anext(merged)
        assert items.num_open == number
        await merged.aclose()
        return items.num_open

    async def fail() -> int:
        items = Items()
        generators = [items.count(str(i), 9) for i in range(number - 1)]
        merged = merge_async_iterators([*generators, items.count("x", 1, fail=True)])
        with pytest.raises(ValueError, match="x"):
            async for _ in merged:
                pass
        return items.num_open

    assert asyncio.run(close_early()) == 0
    assert asyncio.run(fail()) == 0
