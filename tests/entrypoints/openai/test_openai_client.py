"""The official `openai` client against a live server."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import openai
import pytest
from live_server import MODEL, LiveServer

from nanovllm import LLM, SamplingParams

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story about a dog."}]


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def offline(llm: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    """What `LLM.generate` makes of it: the RequestOutput."""
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


# ---- completions ----


def test_a_completion_is_what_the_engine_makes_offline(client: openai.OpenAI, llm: LLM) -> None:
    response = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, temperature=0.0)
    expected = offline(llm, max_tokens=20, temperature=0.0).outputs[0]
    choice = response.choices[0]
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert response.object == "text_completion"
    assert response.model == MODEL
    assert response.id.startswith("cmpl-")
    assert response.usage is not None
    assert response.usage.prompt_tokens == len(offline(llm, max_tokens=1).prompt_token_ids)
    assert response.usage.completion_tokens == 20
    assert response.usage.total_tokens == response.usage.prompt_tokens + 20


def test_a_stream_gives_the_same_text_in_pieces(client: openai.OpenAI, llm: LLM) -> None:
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=20,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    expected = offline(llm, max_tokens=20, temperature=0.0).outputs[0]
    pieces = [chunk.choices[0] for chunk in chunks[:-1]]
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == expected.text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_carries_no_usage_unless_asked(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_usage_so_far_in_every_chunk(client: openai.OpenAI) -> None:
    for create, prompt in (
        (client.completions.create, {"prompt": PROMPT}),
        (client.chat.completions.create, {"messages": MESSAGES}),
    ):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(
            create(model=MODEL, max_tokens=4, stream=True, stream_options=options, **prompt)
        )
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == chunks[-2].usage.completion_tokens > 0


def test_n_seeded_samples_streamed_or_not_are_those_of_the_engine(
    client: openai.OpenAI, llm: LLM
) -> None:
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "n": 3, "seed": 7}
    expected = [o.text for o in offline(llm, max_tokens=12, n=3, seed=7).outputs]
    assert len(set(expected)) == 3
    response = client.completions.create(**request)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert [choice.text for choice in response.choices] == expected
    texts = ["", "", ""]
    for chunk in client.completions.create(**request, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_several_prompts_of_text_or_tokens(client: openai.OpenAI, llm: LLM) -> None:
    prompts = [PROMPT, "The cat", "A dog went to the"]
    ids = [llm.get_tokenizer().encode(prompt) for prompt in prompts]
    expected = [offline(llm, prompt, max_tokens=8, temperature=0.0) for prompt in prompts]
    texts = [output.outputs[0].text for output in expected]
    for form in (prompts, ids):
        request = {"model": MODEL, "prompt": form, "max_tokens": 8, "temperature": 0.0}
        response = client.completions.create(**request)
        assert [choice.text for choice in response.choices] == texts
        assert response.usage is not None
        assert response.usage.prompt_tokens == sum(map(len, ids))
        streamed = [""] * 3
        for chunk in client.completions.create(**request, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == texts
    one = client.completions.create(model=MODEL, prompt=ids[1], max_tokens=8, temperature=0.0)
    assert [choice.text for choice in one.choices] == [texts[1]]


def test_logprobs_of_a_completion(client: openai.OpenAI, llm: LLM) -> None:
    request = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0.0,
        "logprobs": 2,
    }
    output = offline(llm, max_tokens=6, temperature=0.0, logprobs=2).outputs[0]
    logprobs = client.completions.create(**request).choices[0].logprobs
    assert logprobs is not None
    expected = [p[t].logprob for p, t in zip(output.logprobs, output.token_ids, strict=True)]
    assert logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert "".join(logprobs.tokens) == output.text
    offsets = [len("".join(logprobs.tokens[:i])) for i in range(6)]
    assert logprobs.text_offset == offsets
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    assert logprobs.top_logprobs[0][logprobs.tokens[0]] == logprobs.token_logprobs[0]

    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(**request, stream=True):
        for name, values in streamed.items():
            values.extend(getattr(chunk.choices[0].logprobs, name))
    assert streamed["tokens"] == logprobs.tokens
    assert streamed["token_logprobs"] == pytest.approx(logprobs.token_logprobs, abs=1e-4)
    assert streamed["text_offset"] == offsets


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_begins_with_the_prompt_and_its_logprobs(
    client: openai.OpenAI, llm: LLM, max_tokens: int, as_tokens: bool, stream: bool
) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    response = client.completions.create(
        model=MODEL,
        prompt=ids if as_tokens else PROMPT,
        max_tokens=max_tokens,
        temperature=0.0,
        logprobs=1,
        echo=True,
        stream=stream,
    )
    choices = [chunk.choices[0] for chunk in response] if stream else [response.choices[0]]
    generated = offline(llm, max_tokens=max(max_tokens, 1), temperature=0.0, prompt_logprobs=1)
    expected = generated.outputs[0].text if max_tokens else ""
    assert "".join(choice.text for choice in choices) == PROMPT + expected
    assert choices[-1].finish_reason == "length"
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    values = [value for choice in choices for value in choice.logprobs.token_logprobs]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert "".join(tokens) == PROMPT + expected
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert values[0] is None
    prompt_logprobs = [
        position[token_id].logprob
        for position, token_id in zip(generated.prompt_logprobs[1:], ids[1:], strict=True)
    ]
    assert values[1 : len(ids)] == pytest.approx(prompt_logprobs, abs=1e-4)
    if not stream:
        assert response.usage.completion_tokens == max_tokens


def test_echo_of_several_samples_repeats_the_prompt_in_each(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "n": 2, "seed": 1}
    request |= {"echo": True, "logprobs": 0}
    whole = client.completions.create(**request)
    texts = ["", ""]
    tokens: list[list[str]] = [[], []]
    for chunk in client.completions.create(**request, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert all(text.startswith(PROMPT) for text in texts)


def test_a_stop_string_ends_the_text_and_is_named(client: openai.OpenAI, llm: LLM) -> None:
    full = offline(llm, max_tokens=30, temperature=0.0).outputs[0].text
    stop = full.split()[4]
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0.0}
    choice = client.completions.create(**request, stop=stop).choices[0]
    assert choice.text == full[: full.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    kept = client.completions.create(
        **request, stop=["no such text", stop], extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == full[: full.index(stop) + len(stop)]
    streamed = client.completions.create(**request, stop=[stop], stream=True, logprobs=0)
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_sampling_parameters_of_vllms_reach_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    greedy = offline(llm, max_tokens=10, temperature=0.0).outputs[0].text
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "temperature": 1.5}
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        assert client.completions.create(**request, extra_body=extra).choices[0].text == greedy
    comma = llm.get_tokenizer().encode(",")[0]
    forced = client.completions.create(**request, logit_bias={str(comma): 100})
    assert forced.choices[0].text == "," * 10
    allowed = client.completions.create(**request, extra_body={"allowed_token_ids": [comma]})
    assert allowed.choices[0].text == "," * 10
    stopped = client.completions.create(
        **request,
        logit_bias={str(comma): 100},
        extra_body={"stop_token_ids": [comma], "min_tokens": 2},
    )
    assert stopped.choices[0].stop_reason == comma
    banned = client.completions.create(
        **request | {"temperature": 0}, logit_bias={str(comma): -100}
    )
    assert not banned.choices[0].text.startswith(",")


def test_ignore_eos_goes_on_to_max_tokens(client: openai.OpenAI, llm: LLM) -> None:
    eos = llm.get_tokenizer().eos_token_id
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "logit_bias": {str(eos): 100}}
    ended = client.completions.create(**request)
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1)
    assert ended.choices[0].stop_reason is None
    went_on = client.completions.create(**request, extra_body={"ignore_eos": True})
    assert (went_on.choices[0].finish_reason, went_on.usage.completion_tokens) == ("length", 5)


def test_cached_prefixes_are_shared_only_within_a_salt(
    client: openai.OpenAI, server: LiveServer
) -> None:
    server.wait_until_idle()  # forgets what other tests left in the cache
    prompt = "There was a little cat who liked to play with a red ball in the garden. " * 3

    def cached_tokens(**extra: Any) -> int:
        response = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=1, extra_body=extra
        )
        return response.usage.prompt_tokens_details.cached_tokens

    assert [cached_tokens(cache_salt="a"), cached_tokens(cache_salt="b")] == [0, 0]
    assert cached_tokens() == 0
    assert cached_tokens(cache_salt="a") >= 16
    assert cached_tokens() >= 16


def test_token_ids_on_request(client: openai.OpenAI, llm: LLM) -> None:
    output = offline(llm, max_tokens=4, temperature=0.0)
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0.0}
    choice = client.completions.create(**request, logprobs=0, extra_body=extra).choices[0]
    ids = output.outputs[0].token_ids
    assert (choice.token_ids, choice.prompt_token_ids) == (ids, output.prompt_token_ids)
    assert choice.logprobs.tokens == [f"token_id:{i}" for i in ids]
    chunks = list(client.completions.create(**request, stream=True, extra_body=extra))
    assert [i for chunk in chunks for i in chunk.choices[0].token_ids] == ids
    assert chunks[0].choices[0].prompt_token_ids == output.prompt_token_ids


def test_prompt_logprobs_on_request(client: openai.OpenAI, llm: LLM) -> None:
    output = offline(llm, max_tokens=1, prompt_logprobs=1)
    choice = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 1}
    ).choices[0]
    assert choice.prompt_logprobs[0] is None
    for shown, expected in zip(choice.prompt_logprobs[1:], output.prompt_logprobs[1:], strict=True):
        assert {int(i) for i in shown} == set(expected)
        for token_id, logprob in expected.items():
            assert shown[str(token_id)]["logprob"] == pytest.approx(logprob.logprob, abs=1e-4)
            assert shown[str(token_id)]["rank"] == logprob.rank


# ---- chat ----


def chat_output(llm: LLM, messages: Any = MESSAGES, **params: Any) -> Any:
    return llm.chat(messages, SamplingParams(**params), use_tqdm=False)[0]


def test_a_chat_is_what_the_engine_makes_offline(client: openai.OpenAI, llm: LLM) -> None:
    response = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=12, temperature=0.0
    )
    output = chat_output(llm, max_tokens=12, temperature=0.0)
    choice = response.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", output.outputs[0].text)
    assert choice.finish_reason == output.outputs[0].finish_reason
    assert response.id.startswith("chatcmpl-")
    assert response.usage.prompt_tokens == len(output.prompt_token_ids)


def test_a_chat_without_max_tokens_goes_on_to_its_end(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0.0)
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.completion_tokens > 16


def test_a_streamed_chat_begins_with_the_role(client: openai.OpenAI, llm: LLM) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=12,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    text = "".join(chunk.choices[0].delta.content for chunk in chunks[:-1])
    assert text == chat_output(llm, max_tokens=12, temperature=0.0).outputs[0].text
    assert [c.choices[0].finish_reason for c in chunks[-3:-1]] == [None, "length"]
    assert chunks[-1].usage.completion_tokens == 12


def test_logprobs_of_a_chat(client: openai.OpenAI, llm: LLM) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "seed": 3}
    request |= {"logprobs": True, "top_logprobs": 3}
    output = chat_output(llm, max_tokens=5, seed=3, logprobs=3).outputs[0]
    content = client.chat.completions.create(**request).choices[0].logprobs.content
    assert len(content) == 5
    for entry, token_id, position in zip(content, output.token_ids, output.logprobs, strict=True):
        assert entry.logprob == pytest.approx(position[token_id].logprob, abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        best = sorted((p.logprob for p in position.values()), reverse=True)[:3]
        assert values == pytest.approx(best, abs=1e-4)
    assert "".join(entry.token for entry in content) == output.text
    streamed = [
        entry
        for chunk in client.chat.completions.create(**request, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    only_sampled = client.chat.completions.create(**request | {"top_logprobs": None})
    assert all(not entry.top_logprobs for entry in only_sampled.choices[0].logprobs.content)


def test_n_samples_of_a_chat(client: openai.OpenAI, llm: LLM) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "n": 2, "seed": 11}
    expected = [output.text for output in chat_output(llm, max_tokens=6, n=2, seed=11).outputs]
    whole = client.chat.completions.create(**request)
    assert [choice.message.content for choice in whole.choices] == expected
    texts, roles = ["", ""], [0, 0]
    for chunk in client.chat.completions.create(**request, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
    assert (texts, roles) == (expected, [1, 1])


def test_the_last_message_can_be_continued_and_echoed(client: openai.OpenAI) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once there was"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    request = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0.0}
    plain = client.chat.completions.create(**request, extra_body=extra)
    echoed = client.chat.completions.create(**request, extra_body=extra | {"echo": True})
    text = plain.choices[0].message.content
    assert echoed.choices[0].message.content == "Once there was" + text
    streamed = client.chat.completions.create(
        **request, extra_body=extra | {"echo": True}, stream=True
    )
    assert "".join(c.choices[0].delta.content for c in streamed) == "Once there was" + text


def test_text_parts_of_a_message_are_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}]
    request = {"model": MODEL, "max_tokens": 4, "temperature": 0.0}
    joined = client.chat.completions.create(
        **request, messages=[{"role": "user", "content": "Tell me\na story."}]
    )
    response = client.chat.completions.create(
        **request, messages=[{"role": "user", "content": parts}]
    )
    assert response.choices[0].message.content == joined.choices[0].message.content
    assert response.usage.prompt_tokens == joined.usage.prompt_tokens


# ---- models and mistakes ----


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 1024
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.models.retrieve("gpt-4")


def test_mistakes_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as e:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert e.value.param == "temperature"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for extra in ({"tools": [tool]}, {"response_format": {"type": "json_object"}}):
        (name,) = extra
        with pytest.raises(openai.BadRequestError, match=f"{name} is not supported") as e:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, **extra)
        assert e.value.param == name
    # Those that change nothing are welcome.
    client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=1,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
    )


# ---- many at once ----


def test_many_streams_at_once_some_cancelled_are_each_their_own(
    server: LiveServer, llm: LLM
) -> None:
    prompts = [f"{PROMPT} there {'was' if i % 2 else 'were'} {i}" for i in range(24)]
    params = [
        SamplingParams(max_tokens=10 + i, temperature=0.0, ignore_eos=True) for i in range(24)
    ]
    expected = [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]
    rng = random.Random(0)
    cancelled = {i for i in range(24) if rng.random() < 0.3}
    assert 0 < len(cancelled) < 24

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.completions.create(
            model=MODEL,
            prompt=prompts[i],
            max_tokens=800 if i in cancelled else 10 + i,
            temperature=0.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if i in cancelled and len(text) > 5:
                await stream.close()
                break
        return text

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, i) for i in range(24)))

    texts = asyncio.run(ask_all())
    for i in range(24):
        if i not in cancelled:
            assert texts[i] == expected[i]
    # (The fixture checks that nothing is left of the cancelled ones.)


def test_the_async_client_chats(server: LiveServer, llm: LLM) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            response = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0.0
            )
            return response.choices[0].message.content or ""

    assert asyncio.run(ask()) == chat_output(llm, max_tokens=6, temperature=0.0).outputs[0].text


def test_logprobs_are_finite_also_where_a_token_is_impossible(client: openai.OpenAI) -> None:
    response = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=2, logprobs=20, logit_bias={"5": -100}
    )
    for top in response.choices[0].logprobs.top_logprobs:
        assert all(math.isfinite(value) and value >= -9999 for value in top.values())
