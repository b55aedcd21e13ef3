"""`nanovllm bench serve`: measure a server that speaks OpenAI's protocol.

Upstream: vllm/entrypoints/cli/benchmark/main.py and serve.py (0.23.0)
Left out: bench latency, throughput, startup and sweep.
"""

from __future__ import annotations

import argparse

from nanovllm.benchmarks.args import add_cli_args

EPILOG = """\
Examples:
  nanovllm bench serve --num-prompts 100 --input-len 128 --output-len 32
  nanovllm bench serve --request-rate 4 --burstiness 0.5 --goodput ttft:200 tpot:50
  nanovllm bench serve --dataset-name prefix_repetition --max-concurrency 16 --save-result
  nanovllm bench serve --base-url http://host:8000 --dataset-name custom --dataset-path p.jsonl

Flags, metrics and the fields of the result file are those of `vllm bench serve`.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb to the `nanovllm` command."""
    parser = subparsers.add_parser(
        "bench", help="measure a server", description="Benchmarks.", allow_abbrev=False
    )
    parser.set_defaults(run=lambda args: parser.print_help())
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    serve = benches.add_parser(
        "serve",
        help="latency and throughput of a running server",
        description="Send requests to a running server and measure what comes back, and when.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    serve.set_defaults(run=run_serve)
    add_cli_args(serve)


def run_serve(args: argparse.Namespace) -> None:
    """Run the benchmark and print its table.

    Raises:
        VLLMValidationError: see nanovllm.benchmarks.serve.main.
    """
    from nanovllm.benchmarks import serve

    serve.main(args)
