"""Three requests to AsyncLLM, one of them through the server's application; no socket is opened.

    chat    POST /v1/chat/completions, streamed: 3 tokens
    slow    takes one output, then nothing until the engine is idle
    gone    takes one output of a request for 8 tokens, then leaves

The engine runs in a thread, and whoever is quicker would decide how many steps an output joins. So
the thread is held up after each step until the event loop has handled the step's outputs.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import aclosing

import httpx

from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.entrypoints.openai.api_server import build_app, init_app_state
from nanovllm.entrypoints.openai.cli_args import FrontendArgs
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.v1.engine import EngineCoreOutputs
from nanovllm.v1.engine.async_llm import AsyncLLM

logging.getLogger("httpx").setLevel(logging.WARNING)

CHAT = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
    "max_tokens": 3,
}
ENGINE_ARGS = EngineArgs(
    device="cpu", enforce_eager=True, block_size=4, num_gpu_blocks_override=24, max_model_len=64
)
# The first engine imports much, and is no part of what is shown.
AsyncLLM.from_engine_args(ENGINE_ARGS).shutdown()

# Rounds of the event loop that take an output from the engine's thread to its reader; fewer do.
ROUNDS = 20


def deltas(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


def hold_up(engine: AsyncLLM) -> None:
    """Let the engine's thread wait after each step until its outputs have been handled."""
    core_loop = engine.engine_core._core_loop  # type: ignore[attr-defined]
    event_loop, put_output = asyncio.get_running_loop(), core_loop.put_output

    async def settle() -> None:
        for _ in range(ROUNDS):
            await asyncio.sleep(0)

    def put_and_wait(outputs: EngineCoreOutputs) -> None:
        put_output(outputs)
        if outputs.utility_output is None:
            asyncio.run_coroutine_threadsafe(settle(), event_loop).result(timeout=30)

    core_loop.put_output = put_and_wait


async def until_idle(engine: AsyncLLM) -> None:
    while await engine.engine_core.call_utility_async("has_work"):
        pass


async def chat(engine: AsyncLLM) -> list[str]:
    """The server-sent events of a streamed answer."""
    args = FrontendArgs()
    app = build_app(args)
    init_app_state(engine, app, args)
    # (This transport hands over the answer as a whole, after the last event.)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://nanovllm"
    ) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    return [line.removeprefix("data: ") for line in response.text.splitlines() if line]


async def slow(engine: AsyncLLM) -> list[RequestOutput]:
    """Two outputs: what came first, and what has gathered since."""
    generator = engine.generate("Once upon a time", deltas(4), "slow")
    outputs = [await anext(generator)]
    await until_idle(engine)
    outputs += [output async for output in generator]
    return outputs


async def gone(engine: AsyncLLM) -> RequestOutput:
    async with aclosing(engine.generate("The little dog", deltas(8), "gone")) as outputs:
        return await anext(outputs)


async def requests(engine: AsyncLLM) -> None:
    hold_up(engine)
    show_events(await chat(engine))
    await until_idle(engine)
    for output in await slow(engine):
        print("slow:", output.outputs[0].token_ids, repr(output.outputs[0].text))
    print("gone:", repr((await gone(engine)).outputs[0].text))
    await until_idle(engine)


def show_events(events: list[str]) -> None:
    *chunks, done = events
    parsed = [json.loads(chunk) for chunk in chunks]
    texts = [c["choices"][0]["delta"].get("content") for c in parsed if c["choices"]]
    usage = parsed[-1]["usage"]
    print("chat:", texts, usage, done)


def main() -> None:
    engine = AsyncLLM.from_engine_args(ENGINE_ARGS)
    try:
        asyncio.run(requests(engine))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
