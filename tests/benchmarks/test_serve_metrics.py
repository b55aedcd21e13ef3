"""The metrics of `bench serve` against timelines made by hand: every figure is known beforehand."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from nanovllm.benchmarks import serve
from nanovllm.benchmarks.lib import endpoint_request_func as requests
from nanovllm.benchmarks.lib.endpoint_request_func import (
    ASYNC_REQUEST_FUNCS,
    RequestFuncInput,
    RequestFuncOutput,
    StreamedResponseHandler,
)
from nanovllm.benchmarks.serve import (
    SampleRequest,
    calculate_metrics,
    get_arrival_times,
    get_request,
    make_result,
    parse_goodput,
)
from nanovllm.exceptions import VLLMValidationError
from tests.fake_server import DONE, chat_chunk, chunk, event, usage


def output(
    start: float, ttft: float, *itl: float, tokens: int | None = None, prompt: int = 10
) -> RequestFuncOutput:
    """A successful request of `tokens` tokens (one a chunk, unless given)."""
    return RequestFuncOutput(
        success=True,
        start_time=start,
        ttft=ttft,
        itl=list(itl),
        latency=ttft + sum(itl),
        output_tokens=1 + len(itl) if tokens is None else tokens,
        prompt_len=prompt,
        generated_text="a text",
    )


FAILED = RequestFuncOutput(error="HTTP 500: out of luck", prompt_len=999, start_time=50.0)

# Two requests, one that failed, and one of a single token; the run took 4 s.
OUTPUTS = [
    output(100.0, 0.5, 0.1, 0.3, prompt=20),  # TPOT 0.2, E2EL 0.9
    output(101.0, 1.0, 0.2, 0.2, 0.2, 0.4, tokens=11, prompt=30),  # TPOT 0.1, E2EL 2.0
    FAILED,
    output(101.5, 0.3, prompt=5),  # no TPOT, E2EL 0.3
]


@pytest.fixture(scope="module")
def metrics() -> serve.BenchmarkMetrics:
    return calculate_metrics(OUTPUTS, 4.0, None, [50.0, 99.0], {})[0]


def test_requests_and_tokens_are_counted_and_failures_left_out(
    metrics: serve.BenchmarkMetrics,
) -> None:
    assert (metrics.completed, metrics.failed) == (3, 1)
    assert (metrics.total_input, metrics.total_output) == (55, 3 + 11 + 1)
    assert metrics.request_throughput == 3 / 4
    assert metrics.output_throughput == 15 / 4
    assert metrics.total_token_throughput == (55 + 15) / 4
    assert metrics.request_goodput == 0


def test_ttft_and_e2el_are_over_the_requests_that_succeeded(
    metrics: serve.BenchmarkMetrics,
) -> None:
    assert metrics.ttft.mean == pytest.approx(600)
    assert metrics.ttft.median == pytest.approx(500)
    assert metrics.ttft.std == pytest.approx(math.sqrt((100**2 + 400**2 + 300**2) / 3))
    assert metrics.ttft.percentiles == [(50.0, pytest.approx(500)), (99.0, pytest.approx(990))]
    assert metrics.e2el.mean == pytest.approx((900 + 2000 + 300) / 3)
    assert metrics.e2el.percentiles[1] == (99.0, pytest.approx(900 + 0.98 * 1100))


def test_tpot_is_by_tokens_and_leaves_out_requests_of_one_token(
    metrics: serve.BenchmarkMetrics,
) -> None:
    assert metrics.tpot.mean == pytest.approx((200 + 100) / 2)
    assert metrics.tpot.median == pytest.approx(150)


def test_itl_is_by_chunks_over_all_requests(metrics: serve.BenchmarkMetrics) -> None:
    gaps = [100, 300, 200, 200, 200, 400]
    assert metrics.itl.mean == pytest.approx(np.mean(gaps))
    assert metrics.itl.median == pytest.approx(200)
    assert metrics.itl.std == pytest.approx(np.std(gaps))


def test_the_busiest_second_is_counted_from_the_first_sending(
    metrics: serve.BenchmarkMetrics,
) -> None:
    # Chunks at 0.5, 0.6, 0.9 | 1.8 | 2.0, 2.2, 2.4, 2.6 | 3.0
    assert metrics.max_output_tokens_per_s == 4
    # In second 1, the second and the last request are out; the first has ended at 0.9.
    assert metrics.max_concurrent_requests == 2


def test_requests_that_follow_each_other_within_a_second_count_as_two() -> None:
    one_after_the_other = [output(10.0, 0.2), output(10.5, 0.2)]
    metrics, _ = calculate_metrics(one_after_the_other, 1.0, None, [99.0], {})
    assert metrics.max_concurrent_requests == 2
    far_apart = [output(10.0, 0.2), output(15.0, 0.2)]
    metrics, _ = calculate_metrics(far_apart, 6.0, None, [99.0], {})
    assert metrics.max_concurrent_requests == 1


@pytest.mark.parametrize(
    ("objectives", "num_good"),
    [
        ({"ttft": 500}, 2),  # 500 ms is kept, exactly
        ({"ttft": 499.9}, 1),
        ({"tpot": 100}, 2),  # one token: TPOT 0, always good
        ({"tpot": 0}, 1),
        ({"e2el": 1000}, 2),
        ({"ttft": 1000, "tpot": 150}, 2),
        ({"ttft": 600, "tpot": 150}, 1),
        ({"ttft": 600, "e2el": 100}, 0),
    ],
)
def test_goodput_is_the_rate_of_requests_that_met_every_objective(
    objectives: dict[str, float], num_good: int
) -> None:
    # Powers of two, so that no rounding decides.
    outputs = [
        output(100.0, 0.5, 0.25, 0.25, tokens=3),  # TPOT 0.25
        output(101.0, 1.0, 0.5, 0.5, tokens=11),  # TPOT 0.1
        FAILED,
        output(101.5, 0.25),
    ]
    metrics, _ = calculate_metrics(outputs, 4.0, None, [99.0], objectives)
    assert metrics.request_goodput == num_good / 4


def test_without_any_success_all_figures_are_zero() -> None:
    metrics, lens = calculate_metrics([FAILED, FAILED], 2.0, None, [99.0], {"ttft": 1})
    assert lens == [0, 0]
    assert (metrics.completed, metrics.failed, metrics.total_input) == (0, 2, 0)
    assert metrics.ttft == serve.Summary(0, 0, 0, [(99.0, 0)])
    assert metrics.max_output_tokens_per_s == 0


def test_tokens_are_counted_with_the_tokenizer_when_the_server_sends_no_usage() -> None:
    class Words:
        def encode(self, text: str, add_special_tokens: bool) -> list[str]:
            assert not add_special_tokens
            return text.split()

    silent = output(0.0, 0.5, 0.25, tokens=0)
    silent.generated_text = "one two three"
    words: Any = Words()
    assert calculate_metrics([silent], 1.0, words, [99.0], {})[1] == [3]
    assert calculate_metrics([silent], 1.0, None, [99.0], {})[1] == [1]


def test_the_result_has_vllms_field_names() -> None:
    metrics, lens = calculate_metrics(OUTPUTS, 4.0, None, [99.0, 99.9], {})
    result = make_result(metrics, OUTPUTS, lens, 4.0, ["ttft", "itl", "e2el"], False)
    assert result["mean_ttft_ms"] == pytest.approx(600)
    assert result["p99_ttft_ms"] == pytest.approx(990)
    assert result["p99.9_ttft_ms"] == pytest.approx(999)
    assert result["std_e2el_ms"] > 0
    assert "mean_tpot_ms" not in result  # not selected
    assert result["request_goodput"] is None  # no objectives
    assert result["output_lens"] == [3, 11, 0, 1]
    assert result["input_lens"] == [20, 30, 999, 5]
    assert result["errors"] == ["", "", "HTTP 500: out of luck", ""]
    assert result["ttfts"] == [0.5, 1.0, 0.0, 0.3]
    assert result["itls"][1] == [0.2, 0.2, 0.2, 0.4]
    assert result["start_times"] == [100.0, 101.0, 50.0, 101.5]
    scalars = {
        *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
        *("request_throughput", "output_throughput", "total_token_throughput"),
        *("max_output_tokens_per_s", "max_concurrent_requests"),
    }
    assert scalars <= set(result)


def test_objectives_are_read_and_others_refused() -> None:
    assert parse_goodput(["ttft:200", "e2el:5e3"]) == {"ttft": 200, "e2el": 5000}
    for wrong in ("itl:5", "ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:x", ":5"):
        with pytest.raises(VLLMValidationError, match="goodput"):
            parse_goodput([wrong])


# ---- arrivals ----


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_at_an_infinite_rate_all_requests_go_at_once() -> None:
    assert get_arrival_times(3, math.inf, 1.0, rng()) == [0, 0, 0]


def test_a_metronome_is_a_metronome() -> None:
    assert get_arrival_times(4, 2.0, math.inf, rng()) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_are_gamma_distributed_about_the_rate(burstiness: float) -> None:
    """Mean 1 / rate, exactly; coefficient of variation 1 / sqrt(burstiness)."""
    times = np.array(get_arrival_times(20_000, 5.0, burstiness, rng()))
    assert times[-1] == pytest.approx(20_000 / 5.0)
    intervals = np.diff(times, prepend=0.0)
    assert (intervals >= 0).all()
    variation = intervals.std() / intervals.mean()
    assert variation == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_depend_on_the_seed_alone() -> None:
    times = [get_arrival_times(10, 3.0, 1.0, np.random.default_rng(s)) for s in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


def test_requests_are_sent_when_their_time_has_come() -> None:
    """Never early; one that is late does not push back those after it."""
    samples = [SampleRequest(str(i), 1, 1) for i in range(4)]
    times = [0.0, 0.05, 0.05, 0.15]

    async def run() -> list[tuple[str, float]]:
        start = time.perf_counter()
        sent = []
        async for request in get_request(samples, times):
            sent.append((request.prompt, time.perf_counter() - start))
            if request.prompt == "1":
                time.sleep(0.04)  # the sender is held up
        return sent

    sent = asyncio.run(run())
    assert [prompt for prompt, _ in sent] == ["0", "1", "2", "3"]
    for (_, moment), planned in zip(sent, times, strict=True):
        assert moment >= planned - 1e-3
    assert sent[3][1] < 0.15 + 0.04  # not 0.19 or later


# ---- one request, on a clock that the server moves ----


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(requests, "time", clock)
    return clock


def ask(
    clock: Clock, *parts: Any, backend: str = "openai", status: int = 200, **kwargs: Any
) -> tuple[RequestFuncOutput, httpx.Request]:
    """One request to a server that answers `parts`: bytes, or seconds that pass before the next."""
    seen: list[httpx.Request] = []

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            if isinstance(part, bytes):
                yield part
            elif isinstance(part, Exception):
                raise part
            else:
                clock.now += part

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, content=body())

    async def run() -> RequestFuncOutput:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
            path = "chat/completions" if "chat" in backend else "completions"
            template = RequestFuncInput(
                prompt="hello",
                api_url=f"http://server/v1/{path}",
                prompt_len=3,
                output_len=8,
                model="m",
                **kwargs,
            )
            return await ASYNC_REQUEST_FUNCS[backend](template, client)

    return asyncio.run(run()), seen[0]


def test_the_moments_of_a_stream_are_those_of_its_chunks(clock: Clock) -> None:
    output, _ = ask(
        clock, 0.5, chunk("a"), 0.25, chunk(" b"), 0.125, chunk(""), 2.0, usage(7, 4), 1.0, DONE
    )
    assert output.success
    assert output.start_time == 1000.0
    assert output.ttft == 0.5
    assert output.itl == [0.25, 0.125]
    assert output.latency == 0.875  # usage and [DONE] come later, and do not count
    assert output.generated_text == "a b"
    assert (output.prompt_len, output.output_tokens) == (7, 4)


def test_a_network_chunk_of_two_events_counts_twice(clock: Clock) -> None:
    output, _ = ask(clock, 0.5, chunk("a") + chunk("b"), 0.5, chunk("c") + usage(2, 3) + DONE)
    assert output.itl == [0.0, 0.5]
    assert output.generated_text == "abc"


def test_an_event_counts_when_its_end_has_come(clock: Clock) -> None:
    whole = chunk("héllo")
    cut = whole.index("é".encode()) + 1  # in the middle of a character
    output, _ = ask(clock, 0.5, whole[:cut], 0.25, whole[cut:-1], 0.25, whole[-1:])
    assert output.ttft == 1.0
    assert output.generated_text == "héllo"


def test_the_last_event_counts_even_if_the_stream_breaks_off_after_it(clock: Clock) -> None:
    output, _ = ask(clock, 0.5, chunk("a").rstrip(b"\n"))
    assert (output.success, output.generated_text) == (True, "a")


def test_comments_and_crlf_are_understood(clock: Clock) -> None:
    crlf = chunk("a").replace(b"\n", b"\r\n")
    output, _ = ask(clock, b": ping\n\n", 0.5, crlf, b": ping\r\n\r\n", DONE)
    assert (output.success, output.ttft, output.itl) == (True, 0.5, [])


def test_usage_that_comes_with_the_last_chunk_counts(clock: Clock) -> None:
    last = event(
        {
            "choices": [{"index": 0, "text": "b"}],
            "usage": {"prompt_tokens": 4, "completion_tokens": 9},
        }
    )
    output, _ = ask(clock, 0.5, chunk("a"), 0.5, last, DONE)
    assert (output.prompt_len, output.output_tokens) == (4, 9)
    assert output.itl == [0.5]


def test_chat_counts_the_chunk_that_only_names_the_role(clock: Clock) -> None:
    output, request = ask(
        clock, 0.5, chat_chunk(None, role="assistant"), 0.25, chat_chunk("hi"), DONE,
        backend="openai-chat",
    )  # fmt: skip
    assert (output.ttft, output.itl, output.generated_text) == (0.5, [0.25], "hi")
    body = requests.json.loads(request.content)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["max_completion_tokens"] == 8


def test_the_request_says_what_was_asked_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    _, request = ask(
        clock,
        chunk("a"),
        ignore_eos=True,
        logprobs=2,
        extra_body={"temperature": 0},
        extra_headers={"X-Team": "blue"},
        request_id="bench-5",
    )
    assert requests.json.loads(request.content) == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 8,
        "repetition_penalty": 1.0,
        "logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
    }
    assert request.headers["authorization"] == "Bearer sk-1"
    assert request.headers["x-team"] == "blue"
    assert request.headers["x-request-id"] == "bench-5"


@pytest.mark.parametrize(
    ("parts", "kwargs", "error"),
    [
        ([b'{"error": {"message": "no such model"}}'], {"status": 404}, "HTTP 404: no such model"),
        ([b"Bad Gateway"], {"status": 502}, "HTTP 502: Bad Gateway"),
        ([DONE], {}, "without a token"),
        ([], {}, "without a token"),
        ([chunk("a"), event({"error": {"message": "engine died"}})], {}, "engine died"),
        ([0.5, chunk("a"), httpx.ReadError("reset by peer")], {}, "reset by peer"),
        ([b"data: {not json\n\n"], {}, "JSON"),
        ([b"data: [1]\n\n"], {}, "AttributeError"),
    ],
)
def test_a_failed_request_says_why(
    clock: Clock, parts: list[Any], kwargs: dict[str, Any], error: str
) -> None:
    output, _ = ask(clock, *parts, **kwargs)
    assert not output.success
    assert error in output.error


def test_however_the_bytes_are_cut_the_events_are_the_same() -> None:
    data = chunk("ä€😀") + b": c\n\n" + chunk("b").replace(b"\n", b"\r\n") + DONE
    handler = StreamedResponseHandler()
    expected = handler.add_chunk(data) + handler.finish()
    assert len(expected) == 3
    for size in (1, 2, 3, 7):
        handler = StreamedResponseHandler()
        events = []
        for i in range(0, len(data), size):
            events += handler.add_chunk(data[i : i + size])
        assert events + handler.finish() == expected
