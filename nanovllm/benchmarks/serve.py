"""Send requests to a server at a rate and measure when what comes back.

    get_samples -> get_request (waits for each one's turn) -> request function -> RequestFuncOutput
                                                                  all of them -> calculate_metrics

The clock is the client's. For a request: TTFT, first chunk minus send; ITL, the gaps between
chunks; E2EL, last chunk minus send; TPOT, (E2EL - TTFT) / (output tokens - 1). Over all: goodput,
the requests a second that met every objective.

Upstream: vllm/benchmarks/serve.py (0.23.0); flags, printed lines and the result file's fields are
its own, so that results of both can be laid side by side.
Left out: pooling, ramp-up, traces with times of their own, LoRA, the profiler, speculative-decoding
counts, plots.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

from nanovllm.benchmarks.args import ENDPOINTS, METRIC_NAMES, SAMPLING_FLAGS
from nanovllm.benchmarks.datasets import SampleRequest, get_samples
from nanovllm.benchmarks.lib.endpoint_request_func import (
    ASYNC_REQUEST_FUNCS,
    RequestFunc,
    RequestFuncInput,
    RequestFuncOutput,
    describe_refusal,
    make_headers,
)
from nanovllm.entrypoints.progress import make_progress
from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    import argparse

    from rich.progress import Progress
    from transformers import PreTrainedTokenizerBase

GOODPUT_NAMES = ("ttft", "tpot", "e2el")
# Fields of the result file with an entry a request; only kept with --save-detailed.
DETAILS = (
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
)
REQUEST_TIMEOUT_S = 6 * 60 * 60.0


@dataclass
class Summary:
    """One metric over all requests (ITL: over all gaps), in milliseconds; 0 without any value."""

    mean: float
    median: float
    std: float
    percentiles: list[tuple[float, float]]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> Summary:
        ms = np.asarray(seconds if len(seconds) else [0.0], dtype=np.float64) * 1000
        return cls(
            mean=float(ms.mean()),
            median=float(np.median(ms)),
            std=float(ms.std()),
            percentiles=[(p, float(np.percentile(ms, p))) for p in percentiles],
        )


@dataclass
class BenchmarkMetrics:
    """What `calculate_metrics` finds. Throughputs are a second of the whole run.

    Attributes:
        max_output_tokens_per_s: chunks received in the busiest second.
        max_concurrent_requests: requests alive during some second, at most; two that follow each
            other within a second count as two.
    """

    completed: int
    failed: int
    total_input: int
    total_output: int
    request_throughput: float
    request_goodput: float
    output_throughput: float
    total_token_throughput: float
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2el: Summary
    max_output_tokens_per_s: float
    max_concurrent_requests: int


def get_arrival_times(
    num_requests: int, request_rate: float, burstiness: float, rng: np.random.Generator
) -> list[float]:
    """When each request is sent, in seconds from the start.

    Intervals are drawn from a gamma distribution of shape `burstiness` and mean 1 / request_rate:
    1 is a Poisson process, less comes in bursts, more is more even, inf is a metronome. They are
    then scaled so that the last request goes out at num_requests / request_rate exactly, or the
    throughput would depend on the seed.
    """
    if request_rate == math.inf:
        return [0.0] * num_requests
    if burstiness == math.inf:
        delays = np.full(num_requests, 1.0 / request_rate)
    else:
        delays = rng.gamma(shape=burstiness, size=num_requests)  # of any mean: scaled below
    times = np.cumsum(delays)
    if times[-1] > 0:
        times *= num_requests / request_rate / times[-1]
    return times.tolist()


async def get_request(
    input_requests: Sequence[SampleRequest], arrival_times: Sequence[float]
) -> AsyncGenerator[SampleRequest, None]:
    """Yield each request when its time has come; a late one does not delay those after it."""
    start = time.perf_counter()
    for request, arrival_time in zip(input_requests, arrival_times, strict=True):
        delay = start + arrival_time - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        yield request


def calculate_metrics(
    outputs: Sequence[RequestFuncOutput],
    dur_s: float,
    tokenizer: PreTrainedTokenizerBase | None,
    selected_percentiles: Sequence[float],
    goodput_config_dict: dict[str, float],
) -> tuple[BenchmarkMetrics, list[int]]:
    """Sum up what the requests told.

    Args:
        dur_s: seconds from the first sending to the last answer.
        tokenizer: counts tokens where the server sent no usage; None: one token is assumed.
        goodput_config_dict: "ttft", "tpot", "e2el" -> milliseconds that must not be exceeded. The
            TPOT of a request of one token is 0.

    Returns:
        The metrics, and each request's output tokens (0: it failed).
    """
    successful = [output for output in outputs if output.success]
    output_lens = [_output_len(output, tokenizer) if output.success else 0 for output in outputs]
    tpots: list[float] = []
    num_good = 0
    for output, output_len in zip(outputs, output_lens, strict=True):
        if not output.success:
            continue
        tpot = 0.0
        if output_len > 1:
            tpot = (output.latency - output.ttft) / (output_len - 1)
            tpots.append(tpot)
        measured = {"ttft": output.ttft, "tpot": tpot, "e2el": output.latency}
        num_good += bool(goodput_config_dict) and all(
            measured[name] * 1000 <= limit for name, limit in goodput_config_dict.items()
        )
    total_input = sum(output.prompt_len for output in successful)
    total_output = sum(output_lens)
    busiest, most_concurrent = _peaks(successful)
    metrics = BenchmarkMetrics(
        completed=len(successful),
        failed=len(outputs) - len(successful),
        total_input=total_input,
        total_output=total_output,
        request_throughput=len(successful) / dur_s,
        request_goodput=num_good / dur_s,
        output_throughput=total_output / dur_s,
        total_token_throughput=(total_input + total_output) / dur_s,
        ttft=Summary.of([output.ttft for output in successful], selected_percentiles),
        tpot=Summary.of(tpots, selected_percentiles),
        itl=Summary.of([gap for output in successful for gap in output.itl], selected_percentiles),
        e2el=Summary.of([output.latency for output in successful], selected_percentiles),
        max_output_tokens_per_s=busiest,
        max_concurrent_requests=most_concurrent,
    )
    return metrics, output_lens


def _output_len(output: RequestFuncOutput, tokenizer: PreTrainedTokenizerBase | None) -> int:
    if output.output_tokens:
        return output.output_tokens
    if tokenizer is None:
        return 1
    return len(tokenizer.encode(output.generated_text, add_special_tokens=False))


def _peaks(outputs: Sequence[RequestFuncOutput]) -> tuple[float, int]:
    """Chunks in the busiest second, and requests in the fullest one, counted from the first
    sending."""
    if not outputs:
        return 0.0, 0
    start = min(output.start_time for output in outputs)
    end = max(output.start_time + output.latency for output in outputs)
    chunks = np.zeros(math.ceil(end - start) + 1)
    requests = np.zeros(len(chunks), dtype=np.int64)
    for output in outputs:
        first = output.start_time - start + output.ttft
        moments = first + np.cumsum([0.0, *output.itl])
        np.add.at(chunks, moments.astype(np.int64), 1)
        begin = int(output.start_time - start)
        requests[begin : int(output.start_time - start + output.latency) + 1] += 1
    return float(chunks.max()), int(requests.max())


async def benchmark(
    request_func: RequestFunc,
    client: httpx.AsyncClient,
    template: RequestFuncInput,
    input_requests: Sequence[SampleRequest],
    arrival_times: Sequence[float],
    max_concurrency: int | None = None,
    num_warmups: int = 0,
    disable_tqdm: bool = False,
) -> tuple[list[RequestFuncOutput], float]:
    """Warm up, then send every request in its turn and wait for all answers.

    Args:
        template: what the requests have in common.
        max_concurrency: a request whose time has come waits until fewer than this are out; its
            clock starts after that.
        num_warmups: times the first request is sent before, not measured.

    Returns:
        An output a request, in their order, and the seconds it all took.

    Raises:
        VLLMValidationError: no warm-up request succeeded.
    """
    semaphore: contextlib.AbstractAsyncContextManager = contextlib.nullcontext()
    if max_concurrency is not None:
        semaphore = asyncio.Semaphore(max_concurrency)

    async def run_one(request: SampleRequest, progress: Progress | None) -> RequestFuncOutput:
        async with semaphore:
            output = await request_func(_fill_in(template, request), client)
        if progress is not None:
            progress.advance(progress.task_ids[0])
        return output

    async def run_all(requests: Sequence[SampleRequest], times: Sequence[float], title: str) -> Any:
        with _progress_bar(title, len(requests), disable_tqdm) as progress:
            tasks = [
                asyncio.create_task(run_one(request, progress))
                async for request in get_request(requests, times)
            ]
            return await asyncio.gather(*tasks)

    if num_warmups > 0:
        first = replace(input_requests[0], request_id=None)
        warmups = await run_all([first] * num_warmups, [0.0] * num_warmups, "Warm-up")
        if not any(output.success for output in warmups):
            raise VLLMValidationError(f"no warm-up request succeeded: {warmups[0].error}")
    start = time.perf_counter()
    outputs = await run_all(input_requests, arrival_times, "Requests")
    return outputs, time.perf_counter() - start


def _fill_in(template: RequestFuncInput, request: SampleRequest) -> RequestFuncInput:
    return replace(
        template,
        prompt=request.prompt,
        prompt_len=request.prompt_len,
        output_len=request.expected_output_len,
        request_id=request.request_id,
    )


@contextlib.contextmanager
def _progress_bar(title: str, total: int, disabled: bool) -> Any:
    """A bar of rich on standard error, or None."""
    if disabled:
        yield None
        return
    with make_progress(title) as progress:
        progress.add_task("", total=total)
        yield progress


async def wait_for_endpoint(
    request_func: RequestFunc,
    client: httpx.AsyncClient,
    test_input: RequestFuncInput,
    timeout_seconds: float,
    retry_interval: float = 1.0,
) -> None:
    """Send a request again and again until one succeeds.

    Raises:
        VLLMValidationError: none did within `timeout_seconds`.
    """
    deadline = time.perf_counter() + timeout_seconds
    while True:
        output = await request_func(test_input, client)
        if output.success:
            return
        if time.perf_counter() + retry_interval > deadline:
            raise VLLMValidationError(
                f"{test_input.api_url} did not answer within {timeout_seconds:g} s: {output.error}"
            )
        await asyncio.sleep(retry_interval)


async def get_first_model_from_server(
    base_url: str, client: httpx.AsyncClient, headers: dict[str, str]
) -> str:
    """The name of the first model that the server lists.

    Raises:
        VLLMValidationError: it cannot be reached, or lists none.
    """
    url = f"{base_url}/v1/models"
    try:
        response = await client.get(url, headers=headers)
    except httpx.HTTPError as e:
        raise VLLMValidationError(
            f"{url} cannot be reached: {e or type(e).__name__}; is the server running?"
        ) from e
    if response.status_code != 200:
        reason = describe_refusal(response.status_code, response.content)
        raise VLLMValidationError(f"{url} does not list the models: {reason}; give --model.")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as e:
        raise VLLMValidationError(f"{url} lists no model; give --model.") from e


def parse_goodput(slo_pairs: Sequence[str]) -> dict[str, float]:
    """`["ttft:200", "e2el:5000"]` -> objectives in milliseconds.

    Raises:
        VLLMValidationError: a pair is malformed or names something else.
    """
    objectives = {}
    for pair in slo_pairs:
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in GOODPUT_NAMES or not limit >= 0:
            raise VLLMValidationError(
                f"--goodput {pair!r} must be NAME:MILLISECONDS with one of "
                f"{', '.join(GOODPUT_NAMES)}.",
                parameter="goodput",
                value=pair,
            )
        objectives[name] = limit
    return objectives


def make_result(
    metrics: BenchmarkMetrics,
    outputs: Sequence[RequestFuncOutput],
    output_lens: Sequence[int],
    duration: float,
    selected_metrics: Sequence[str],
    with_goodput: bool,
) -> dict[str, Any]:
    """The measured fields of the result file."""
    result: dict[str, Any] = {
        "duration": duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input,
        "total_output_tokens": metrics.total_output,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput if with_goodput else None,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "input_lens": [output.prompt_len for output in outputs],
        "output_lens": list(output_lens),
        "ttfts": [output.ttft for output in outputs],
        "itls": [output.itl for output in outputs],
        "start_times": [output.start_time for output in outputs],
        "generated_texts": [output.generated_text for output in outputs],
        "errors": [output.error for output in outputs],
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    for name in selected_metrics:
        summary: Summary = getattr(metrics, name)
        result[f"mean_{name}_ms"] = summary.mean
        result[f"median_{name}_ms"] = summary.median
        result[f"std_{name}_ms"] = summary.std
        for p, value in summary.percentiles:
            result[f"p{_percentile_word(p)}_{name}_ms"] = value
    return result


def print_result(result: dict[str, Any], args: argparse.Namespace, names: Sequence[str]) -> None:
    """vLLM's table on standard output."""

    def line(label: str, value: float | None) -> None:
        if value is not None:
            print(
                f"{label:<40} {value:<10.2f}"
                if isinstance(value, float)
                else f"{label:<40} {value:<10}"
            )

    print(f"{' Serving Benchmark Result ':=^50}")
    line("Successful requests:", result["completed"])
    line("Failed requests:", result["failed"])
    line("Maximum request concurrency:", args.max_concurrency)
    if args.request_rate != math.inf:
        line("Request rate configured (RPS):", args.request_rate)
    line("Benchmark duration (s):", result["duration"])
    line("Total input tokens:", result["total_input_tokens"])
    line("Total generated tokens:", result["total_output_tokens"])
    line("Request throughput (req/s):", result["request_throughput"])
    line("Request goodput (req/s):", result["request_goodput"])
    line("Output token throughput (tok/s):", result["output_throughput"])
    line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    line("Peak concurrent requests:", float(result["max_concurrent_requests"]))
    line("Total token throughput (tok/s):", result["total_token_throughput"])
    for name in names:
        short, title = METRIC_NAMES[name]
        print(f"{title:-^50}")
        line(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
        line(f"Median {short} (ms):", result[f"median_{name}_ms"])
        for p in args.metric_percentiles:
            word = _percentile_word(p)
            line(f"P{word} {short} (ms):", result[f"p{word}_{name}_ms"])
    print("=" * 50)


def _percentile_word(p: float) -> str:
    return str(int(p)) if int(p) == p else str(p)


def compute_result_filename(args: argparse.Namespace, model_id: str, date: str) -> Path:
    """Where the result goes, named by what was measured unless --result-filename says how."""
    concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    base_model_id = model_id.rstrip("/").split("/")[-1]
    label = args.label or args.backend
    name = f"{label}-{args.request_rate}qps{concurrency}-{base_model_id}-{date}.json"
    return Path(args.result_dir or ".") / (args.result_filename or name)


def save_result(result: dict[str, Any], path: Path, append: bool) -> None:
    """Write the result, as the file or as one more line of it.

    Raises:
        VLLMValidationError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, mode="a+" if append else "w", encoding="utf-8") as file:
            if append and file.tell() != 0:
                file.write("\n")
            json.dump(result, file)
    except OSError as e:
        raise VLLMValidationError(f"{str(path)!r} cannot be written: {e.strerror}.") from e


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark that the command line describes.

    Returns:
        The fields of the result file.

    Raises:
        VLLMValidationError: flags do not fit each other, the server cannot be reached, or every
            request failed.
    """
    return asyncio.run(main_async(args))


async def main_async(args: argparse.Namespace) -> dict[str, Any]:
    _check(args)
    base_url = (args.base_url or f"http://{_host_port(args.host, args.port)}").rstrip("/")
    api_url = base_url + (args.endpoint or ENDPOINTS[args.backend])
    names = args.percentile_metrics
    goodput = parse_goodput(args.goodput or ())
    extra_headers = _pairs("header", args.header)
    metadata = _pairs("metadata", args.metadata)
    date = datetime.now().strftime("%Y%m%d-%H%M%S")

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(REQUEST_TIMEOUT_S)) as client:
        model_id = args.model or await get_first_model_from_server(
            base_url, client, make_headers(extra_headers)
        )
        tokenizer = None if args.skip_tokenizer_init else _get_tokenizer(args.tokenizer or model_id)
        input_requests = get_samples(args, tokenizer)
        template = RequestFuncInput(
            prompt="",
            api_url=api_url,
            prompt_len=0,
            output_len=0,
            model=args.served_model_name or model_id,
            logprobs=args.logprobs,
            extra_headers=extra_headers,
            extra_body=_extra_body(args),
            ignore_eos=args.ignore_eos or args.dataset_name == "random",
        )
        request_func = ASYNC_REQUEST_FUNCS[args.backend]
        if args.ready_check_timeout_sec > 0:
            test_input = _fill_in(template, replace(input_requests[0], request_id=None))
            await wait_for_endpoint(request_func, client, test_input, args.ready_check_timeout_sec)
        outputs, duration = await benchmark(
            request_func,
            client,
            template,
            input_requests,
            get_arrival_times(
                len(input_requests),
                args.request_rate,
                args.burstiness,
                np.random.default_rng(args.seed),
            ),
            args.max_concurrency,
            args.num_warmups,
            args.disable_tqdm,
        )
    metrics, output_lens = calculate_metrics(
        outputs, duration, tokenizer, args.metric_percentiles, goodput
    )
    measured = make_result(metrics, outputs, output_lens, duration, names, bool(goodput))
    result = {
        "date": date,
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model_id,
        "tokenizer_id": None if args.skip_tokenizer_init else args.tokenizer or model_id,
        "num_prompts": args.num_prompts,
        **metadata,
        "request_rate": args.request_rate if args.request_rate < math.inf else "inf",
        "burstiness": args.burstiness if args.burstiness < math.inf else "inf",
        "max_concurrency": args.max_concurrency,
        **measured,
    }
    _report_failures(outputs)
    print_result(result, args, names)
    if not args.save_detailed:
        result = {name: value for name, value in result.items() if name not in DETAILS}
    if args.save_result or args.append_result:
        save_result(result, compute_result_filename(args, model_id, date), args.append_result)
    if metrics.completed == 0:
        raise VLLMValidationError(f"all {metrics.failed} requests failed: {outputs[0].error}")
    return result


def _report_failures(outputs: Sequence[RequestFuncOutput]) -> None:
    failed = [output for output in outputs if not output.success]
    for i, output in enumerate(failed[:10]):
        print(f"Failed request {i + 1} of {len(failed)}: {output.error}", file=sys.stderr)


def _get_tokenizer(name: str) -> PreTrainedTokenizerBase:
    from nanovllm.engine.arg_utils import resolve_model
    from nanovllm.tokenizers import get_tokenizer

    try:
        return get_tokenizer(resolve_model(name))
    except VLLMValidationError as e:
        raise VLLMValidationError(
            f"prompts are made with the model's tokenizer, and {name!r} is not a local model; give "
            "--tokenizer FOLDER, or --skip-tokenizer-init with --dataset-name custom.",
            parameter="tokenizer",
            value=name,
        ) from e


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check(args: argparse.Namespace) -> None:
    for name, ok, limit in (
        ("num_prompts", args.num_prompts >= 1, "at least 1"),
        ("request_rate", args.request_rate > 0, "above 0"),
        ("burstiness", args.burstiness > 0, "above 0"),
        (
            "max_concurrency",
            args.max_concurrency is None or args.max_concurrency >= 1,
            "at least 1",
        ),
        ("num_warmups", args.num_warmups >= 0, "at least 0"),
    ):
        if not ok:
            value = getattr(args, name)
            raise VLLMValidationError(
                f"--{name.replace('_', '-')} must be {limit}, got {value}.",
                parameter=name,
                value=value,
            )


def _pairs(parameter: str, items: Sequence[str] | None) -> dict[str, str]:
    """`["a=b"]` -> {"a": "b"}"""
    pairs = {}
    for item in items or ():
        key, equals, value = item.partition("=")
        if not equals:
            raise VLLMValidationError(
                f"--{parameter} {item!r} must be KEY=VALUE.", parameter=parameter, value=item
            )
        pairs[key.strip()] = value.strip()
    return pairs


def _extra_body(args: argparse.Namespace) -> dict[str, Any]:
    sampling = {name: getattr(args, name) for name in SAMPLING_FLAGS}
    given = {name: value for name, value in sampling.items() if value is not None}
    return given | (args.extra_body or {})
