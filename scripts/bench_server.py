"""What the server costs: the same requests through LLM.generate and over HTTP, in one run.

    python scripts/bench_server.py [--num-prompts 200] [--rate-requests 20] [--model CHECKPOINT]

    throughput   all requests at once; LLM.generate, the server's whole responses and its streams in
                 turn, --repeat times; the overhead is that of the medians
    TTFT         requests at a fixed rate, one connection each; the client's TTFT less the engine's
                 own, which is vllm:time_to_first_token_seconds of /metrics for the same requests

Both engines schedule alike: the server is given LLM's max_num_seqs and max_num_batched_tokens, its
own defaults being smaller. The server is a process of its own. The client is in this one and stands
for clients elsewhere: it parses nothing before the clock has stopped, and for throughput it looks
at its sockets only every 20 ms. On a machine with few cores it competes with the server for them
all the same; and a reader asleep in a socket is woken at the writer's cost, which one behind a
network is not.

One JSON line a result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

POLL_INTERVAL = 0.02  # seconds


def make_requests(num: int, seed: int) -> list[dict[str, Any]]:
    """Bodies of /v1/completions: random tokens, so that nothing is cached; EOS does not count."""
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(300, 3000) for _ in range(rng.randint(16, 64))],
            "max_tokens": rng.randint(32, 96),
            "temperature": 0.0,
            "ignore_eos": True,
        }
        for _ in range(num)
    ]


class ServerProcess:
    """`nanovllm serve` on a port of the system's choice."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "nanovllm", "serve", *args.model]
        command += ["--port", "0", "--device", args.device, "--disable-uvicorn-access-log"]
        self.process = subprocess.Popen(
            command + args.serve_arg, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.search(r"Serving \S+ on http://(\S+):(\d+)", line):
                self.host, self.port = match[1], int(match[2])
                break
            print(line, end="", file=sys.stderr)
        else:
            raise SystemExit("the server did not start.")
        threading.Thread(target=self._echo, daemon=True).start()

    def _echo(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "WARNING" in line or "ERROR" in line or "Traceback" in line:
                print(line, end="", file=sys.stderr)

    def engine_ttft(self) -> tuple[float, int]:
        """Sum in seconds, and number, of the engine's own TTFTs so far."""
        with urllib.request.urlopen(f"http://{self.host}:{self.port}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        name = "vllm:time_to_first_token_seconds"
        total, count = (
            sum(float(v) for v in re.findall(rf"^{name}_{part}\{{.*\}} (\S+)$", text, re.MULTILINE))
            for part in ("sum", "count")
        )
        return total, int(count)

    def reset_prefix_cache(self) -> None:
        """So that the same requests are computed again."""
        url = f"http://{self.host}:{self.port}/reset_prefix_cache"
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60).close()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


async def post(server: ServerProcess, body: dict[str, Any]) -> tuple[float, bytes]:
    """Seconds to the first piece of the answer's body, and the body (chunked or not)."""
    content = to_http(body)
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(content)
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit((head + await reader.read()).decode())
    pieces = [await reader.read(1 << 16)]
    first = time.perf_counter() - start
    while piece := await reader.read(1 << 16):
        pieces.append(piece)
    writer.close()
    return first, b"".join(pieces)


def to_http(body: dict[str, Any]) -> bytes:
    """A request after which the server closes the connection."""
    content = json.dumps(body).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    )


def num_tokens(answer: bytes) -> int:
    """The completion's length, as the server has counted it."""
    found = re.findall(rb'"completion_tokens":(\d+)', answer)
    return int(found[-1])


def post_all(server: ServerProcess, bodies: list[dict[str, Any]]) -> list[bytes]:
    """The answers, heads included, of requests that are sent all at once."""
    answers = [bytearray() for _ in bodies]
    waiting = {}
    for body, answer in zip(bodies, answers, strict=True):
        sock = socket.create_connection((server.host, server.port))
        sock.sendall(to_http(body))
        sock.setblocking(False)
        waiting[sock] = answer
    while waiting:
        time.sleep(POLL_INTERVAL)
        for sock in list(waiting):
            with contextlib.suppress(BlockingIOError):
                while piece := sock.recv(1 << 16):
                    waiting[sock] += piece
                waiting.pop(sock)
                sock.close()
    for answer in answers:
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(answer.decode())
    return [bytes(answer) for answer in answers]


def measure_server(server: ServerProcess, requests: list[dict[str, Any]], stream: bool) -> float:
    """Output tokens a second."""
    if stream:
        extra = {"stream": True, "stream_options": {"include_usage": True}}
        requests = [body | extra for body in requests]
    server.reset_prefix_cache()
    start = time.perf_counter()
    answers = post_all(server, requests)
    seconds = time.perf_counter() - start
    got = [num_tokens(answer) for answer in answers]
    assert got == [body["max_tokens"] for body in requests]
    return sum(got) / seconds


def measure_offline(llm: Any, requests: list[dict[str, Any]]) -> float:
    """Output tokens a second of LLM.generate, text included."""
    from nanovllm import SamplingParams

    params = [
        SamplingParams(max_tokens=body["max_tokens"], temperature=0.0, ignore_eos=True)
        for body in requests
    ]
    prompts = [{"prompt_token_ids": body["prompt"]} for body in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


async def measure_ttft(
    server: ServerProcess, requests: list[dict[str, Any]], rate: float
) -> list[float]:
    """The client's TTFTs in seconds, requests sent `rate` a second."""

    async def later(i: int, body: dict[str, Any]) -> float:
        await asyncio.sleep(i / rate)
        return (await post(server, body | {"stream": True}))[0]

    return await asyncio.gather(*(later(i, body) for i, body in enumerate(requests)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs=1, default=[], help="default: the embedded model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second, for TTFT")
    parser.add_argument("--rate-requests", type=int, default=20)
    parser.add_argument("--serve-arg", action="append", default=[], help="more of nanovllm serve's")
    args = parser.parse_args()

    from nanovllm import LLM

    llm = LLM(*args.model, device=args.device)
    scheduler_config = llm.llm_engine.vllm_config.scheduler_config
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        flag = f"--{name.replace('_', '-')}"
        args.serve_arg += [flag, str(getattr(scheduler_config, name))]
    server = ServerProcess(args)
    try:
        results: dict[str, list[float]] = {"LLM.generate": [], "server": [], "server, streams": []}
        for repetition in range(args.repeat + 1):
            requests = make_requests(args.num_prompts, repetition)
            rates = (
                measure_offline(llm, requests),
                measure_server(server, requests, stream=False),
                measure_server(server, requests, stream=True),
            )
            if repetition > 0:  # the first warms up
                for values, rate in zip(results.values(), rates, strict=True):
                    values.append(rate)
        offline = statistics.median(results["LLM.generate"])
        for name, values in results.items():
            median = statistics.median(values)
            line = {"what": name, "output_tokens_per_s": round(median, 1)}
            line["all"] = [round(value, 1) for value in values]  # type: ignore[assignment]
            line["overhead"] = round(1 - median / offline, 3)
            print(json.dumps(line), flush=True)

        if args.rate_requests:
            total, count = server.engine_ttft()
            requests = make_requests(args.rate_requests, 7777)
            ttfts = asyncio.run(measure_ttft(server, requests, args.rate))
            new_total, new_count = server.engine_ttft()
            assert new_count - count == len(requests)
            own = (new_total - total) / len(requests)
            mean = statistics.mean(ttfts)
            print(
                json.dumps(
                    {
                        "what": f"TTFT at rate {args.rate:g}",
                        "client_mean_ms": round(mean * 1e3, 2),
                        "client_max_ms": round(max(ttfts) * 1e3, 2),
                        "engine_mean_ms": round(own * 1e3, 2),
                        "difference_ms": round((mean - own) * 1e3, 2),
                    }
                )
            )
    finally:
        server.close()


if __name__ == "__main__":
    main()
