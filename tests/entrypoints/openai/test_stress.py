"""Two hundred streams at once, a third of them left by their clients: nobody else notices.

The same prompts are run offline; every stream that is read to its end must have those tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from live_server import LiveServer

from nanovllm import LLM, SamplingParams

NUM_STREAMS = 200
CANCELLED_SHARE = 0.3


async def _stream(port: int, body: dict[str, Any], num_events: int | None) -> list[int]:
    """The tokens of a stream; `num_events`: hang up after so many events."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    )
    tokens: list[int] = []
    events = 0
    try:
        while events != num_events:
            line = await reader.readline()
            assert line, "the stream has ended without [DONE]"
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return tokens
            tokens += json.loads(line[6:])["choices"][0]["token_ids"]
            events += 1
    finally:
        writer.close()
    return tokens


def test_streams_beside_cancelled_ones_have_the_offline_tokens(
    server: LiveServer, llm: LLM
) -> None:
    rng = random.Random(7)
    hang_ups = {
        i: rng.randrange(6)  # 0: before anything has come
        for i in rng.sample(range(NUM_STREAMS), int(NUM_STREAMS * CANCELLED_SHARE))
    }
    bodies: list[dict[str, Any]] = [
        {
            "prompt": [rng.randrange(300, 3000) for _ in range(rng.randint(1, 20))],
            "max_tokens": 300 if i in hang_ups else rng.randint(2, 20),
            "temperature": 0.0 if i % 2 else 1.0,
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(NUM_STREAMS)
    ]
    kept = [i for i in range(NUM_STREAMS) if i not in hang_ups]
    expected = llm.generate(
        [bodies[i]["prompt"] for i in kept],
        [SamplingParams(**{k: v for k, v in bodies[i].items() if k != "prompt"}) for i in kept],
        use_tqdm=False,
    )

    async def ask_all() -> list[list[int]]:
        port = int(server.url.rpartition(":")[2])
        extra = {"stream": True, "return_token_ids": True}
        return await asyncio.gather(
            *(_stream(port, body | extra, hang_ups.get(i)) for i, body in enumerate(bodies))
        )

    tokens = asyncio.run(ask_all())
    for i, output in zip(kept, expected, strict=True):
        assert tokens[i] == list(output.outputs[0].token_ids), i
    for i, num_events in hang_ups.items():
        assert len(tokens[i]) < 300 and (num_events or not tokens[i])

    server.wait_until_idle()  # no block is in use
    scheduler = server.engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    assert not scheduler.requests
    assert not scheduler.running
    assert not scheduler.waiting
    assert not server.engine.output_processor.request_states
    assert not server.engine.output_processor.external_req_ids
