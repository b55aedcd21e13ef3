"""Does the server's memory stay flat? Thousands of short requests, its resident size on the way.

    python scripts/soak_server.py [--num-requests 3000] [--max-growth-mb 20]

A fifth warms up (allocator, caches); from there on the growth is measured, by
process_resident_memory_bytes of /metrics. The KV cache is kept small (--num-gpu-blocks), so that
the warm-up touches all of it: on the CPU the system gives its pages when they are first written.
Every third request is a stream, every tenth of which is left by its client. Exit code 1: more
growth than allowed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import urllib.request

from bench_server import ServerProcess, make_requests, post


def resident_mb(server: ServerProcess) -> float:
    url = f"http://{server.host}:{server.port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as reply:
        found = re.search(r"^process_resident_memory_bytes (\S+)$", reply.read().decode(), re.M)
    assert found is not None, "the server does not tell its memory on this system"
    return float(found[1]) / 2**20


async def run(server: ServerProcess, first: int, num: int, concurrency: int) -> None:
    """Requests number `first` and on, at most `concurrency` at a time."""
    limit = asyncio.Semaphore(concurrency)

    async def one(i: int, body: dict[str, object]) -> None:
        async with limit:
            body |= {"max_tokens": 4, "stream": i % 3 == 0}
            if i % 30:
                await post(server, body)
                return
            content = json.dumps(body | {"max_tokens": 200}).encode()
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(content) + content
            )
            await reader.readline()
            writer.close()

    bodies = make_requests(num, first)
    await asyncio.gather(*(one(first + i, body) for i, body in enumerate(bodies)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs=1, default=[], help="default: the embedded model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-requests", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--num-gpu-blocks", type=int, default=400)
    parser.add_argument("--max-growth-mb", type=float, default=20)
    parser.add_argument("--serve-arg", action="append", default=[], help="more of nanovllm serve's")
    args = parser.parse_args()
    args.serve_arg += ["--num-gpu-blocks-override", str(args.num_gpu_blocks)]
    server = ServerProcess(args)
    try:
        step = args.num_requests // 5
        sizes = []
        for first in range(0, step * 5, step):
            asyncio.run(run(server, first, step, args.concurrency))
            sizes.append(resident_mb(server))
            print(f"{first + step:6,} requests: {sizes[-1]:.1f} MB", flush=True)
    finally:
        server.close()
    growth = sizes[-1] - sizes[0]
    print(f"growth after the first {step:,}: {growth:.1f} MB")
    sys.exit(growth > args.max_growth_mb)


if __name__ == "__main__":
    main()
