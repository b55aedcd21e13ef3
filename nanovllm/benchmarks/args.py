"""The flags of `nanovllm bench serve`, apart from what they start: `--help` needs no numpy.

Upstream: add_cli_args in vllm/benchmarks/serve.py, add_dataset_parser in
vllm/benchmarks/datasets/datasets.py (0.23.0)
Left out: flags of what is left out there.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

DATASET_NAMES = ("random", "prefix_repetition", "custom")

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}

METRIC_NAMES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}

SAMPLING_FLAGS = (
    "top_p",
    "top_k",
    "min_p",
    "temperature",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags, as far as there is something behind them."""
    server = parser.add_argument_group("server").add_argument
    server("--backend", choices=tuple(ENDPOINTS), default="openai", help="(default: openai)")
    server("--base-url", metavar="URL", help="instead of --host and --port")
    server("--host", default="127.0.0.1", metavar="NAME", help="(default: 127.0.0.1)")
    server("--port", type=int, default=8000, metavar="N", help="(default: 8000)")
    server("--endpoint", metavar="PATH", help="(default: by --backend, as /v1/completions)")
    server("--header", nargs="*", metavar="KEY=VALUE", help="sent with every request")
    server("--model", metavar="NAME", help="(default: the first that the server lists)")
    server("--served-model-name", metavar="NAME", help="what requests call it (default: --model)")
    server("--tokenizer", metavar="NAME", help="to make prompts with (default: the model's)")
    server("--skip-tokenizer-init", action="store_true", help="use none; lengths by the server")

    add_dataset_parser(parser)

    traffic = parser.add_argument_group("traffic").add_argument
    traffic(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="X",
        help="requests a second (default: inf, all at once)",
    )
    traffic(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="shape of the gamma distribution of intervals: 1 Poisson, less: bursts (default: 1)",
    )
    traffic("--max-concurrency", type=int, metavar="N", help="requests out at once at most")
    traffic("--num-warmups", type=int, default=0, metavar="N", help="requests before (default: 0)")
    traffic(
        "--ready-check-timeout-sec",
        type=float,
        default=0,
        metavar="X",
        help="wait so long for the server to come up (default: 0, no check)",
    )

    sampling = parser.add_argument_group("sampling").add_argument
    sampling("--ignore-eos", action="store_true", help="always on with --dataset-name random")
    sampling("--logprobs", type=int, metavar="N", help="ask for logprobs")
    for name in SAMPLING_FLAGS:
        kind: Any = int if name == "top_k" else float
        sampling("--" + name.replace("_", "-"), type=kind, metavar="X", help="sent if given")
    sampling("--extra-body", type=_json_object, metavar="JSON", help="more fields of the request")

    result = parser.add_argument_group("result").add_argument
    result(
        "--percentile-metrics",
        type=_metric_names,
        default=["ttft", "tpot", "itl"],
        metavar="NAMES",
        help="of ttft,tpot,itl,e2el (default: ttft,tpot,itl)",
    )
    result(
        "--metric-percentiles",
        type=_percentiles,
        default=[99.0],
        metavar="LIST",
        help="(default: 99)",
    )
    result("--goodput", nargs="+", metavar="NAME:MS", help="objectives, e.g. ttft:200 tpot:50")
    result("--save-result", action="store_true", help="write a JSON file")
    result("--save-detailed", action="store_true", help="with every request in it")
    result("--append-result", action="store_true", help="add a line to the file instead")
    result("--result-dir", metavar="FOLDER", help="(default: the current one)")
    result("--result-filename", metavar="NAME", help="(default: named by rate, model and date)")
    result("--label", metavar="TEXT", help="in the file and its name (default: --backend)")
    result("--metadata", nargs="*", metavar="KEY=VALUE", help="more fields of the file")
    result("--disable-tqdm", action="store_true", help="no progress bar")


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `get_samples` reads."""
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add("--dataset-name", choices=DATASET_NAMES, default="random", help="(default: random)")
    add("--dataset-path", metavar="FILE", help="prompts of custom: .jsonl, or one a line")
    add("--num-prompts", type=int, default=1000, metavar="N", help="requests (default: 1000)")
    add("--input-len", type=int, metavar="N", help="prompt tokens of random")
    add("--output-len", type=int, metavar="N", help="tokens to generate, in every data set")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default: 0)")
    add("--request-id-prefix", default="bench-", metavar="TEXT", help="(default: bench-)")
    add("--disable-shuffle", action="store_true", help="custom: keep the file's order")
    add("--skip-chat-template", action="store_true", help="custom: send prompts as they are")
    add("--custom-output-len", type=int, metavar="N", help="instead of the file's output_tokens")
    for flag, default, what in (
        ("--random-input-len", 1024, "prompt tokens, the prefix not counted"),
        ("--random-output-len", 128, "tokens to generate"),
        ("--random-prefix-len", 0, "tokens that all prompts begin with"),
        ("--prefix-repetition-prefix-len", 256, "tokens of a shared prefix"),
        ("--prefix-repetition-suffix-len", 256, "tokens after it"),
        ("--prefix-repetition-num-prefixes", 10, "different prefixes"),
        ("--prefix-repetition-output-len", 128, "tokens to generate"),
    ):
        add(flag, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="X",
        help="lengths of random vary by this share up and down (default: 0)",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 50,99 (0 to 100)")
    return values


def _metric_names(text: str) -> list[str]:
    names = text.split(",")
    if not all(name in METRIC_NAMES for name in names):
        known = ",".join(METRIC_NAMES)
        raise argparse.ArgumentTypeError(f"{text!r} names something else than {known}")
    return names
