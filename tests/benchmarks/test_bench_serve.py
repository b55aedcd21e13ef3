"""`nanovllm bench serve` as a whole, against servers whose delays are known."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm.benchmarks.datasets import (
    CustomDataset,
    PrefixRepetitionRandomDataset,
    RandomDataset,
)
from nanovllm.engine.arg_utils import DEFAULT_MODEL, resolve_model
from nanovllm.entrypoints.cli.main import main
from nanovllm.exceptions import VLLMValidationError
from nanovllm.tokenizers import get_tokenizer
from tests.fake_server import (
    DONE,
    FakeServer,
    Request,
    Response,
    chat_chunk,
    chunk,
    event,
    json_response,
    stream,
    usage,
)

FIRST_TOKEN_S, GAP_S, TAIL_S = 0.06, 0.03, 0.08
MODELS = {"object": "list", "data": [{"id": DEFAULT_MODEL, "object": "model"}]}


async def slow_and_steady(request: Request) -> Response:
    """Four tokens in three chunks, and a while until the stream ends."""
    if request.path == "/v1/models":
        return json_response(MODELS)
    return stream(
        FIRST_TOKEN_S, chunk("a"), GAP_S, chunk("b c"), GAP_S, chunk("d"), TAIL_S, usage(9, 4), DONE
    )


def bench(server: FakeServer, *args: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, "--disable-tqdm", *args])


def run(server: FakeServer, tmp_path: Path, *args: str) -> dict[str, Any]:
    """Run it and read the result file."""
    flags = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path)]
    assert bench(server, *flags, "--result-filename", "result.json", *args) == 0
    return json.loads((tmp_path / "result.json").read_text())


RANDOM = ("--input-len", "12", "--output-len", "4")


def test_what_is_measured_is_what_the_server_did(tmp_path: Path) -> None:
    """Never less than its pauses; more by what the machine needs, which is much less than them."""
    with FakeServer(slow_and_steady) as server:
        result = run(
            server,
            tmp_path,
            *RANDOM,
            *("--num-prompts", "6", "--max-concurrency", "2"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--goodput", "ttft:5000", "e2el:1"),
        )
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (54, 24)
    e2el = FIRST_TOKEN_S + 2 * GAP_S
    for name, least in (
        ("ttft", FIRST_TOKEN_S),
        ("itl", GAP_S),
        ("e2el", e2el),
        ("tpot", 2 * GAP_S / 3),
    ):
        median = result[f"median_{name}_ms"]
        # A little less is possible: a chunk that arrives late shortens the gap to the next.
        assert 0.8 * least * 1000 <= median <= least * 1000 + 200, name
    assert min(result["ttfts"]) >= FIRST_TOKEN_S
    assert [len(gaps) for gaps in result["itls"]] == [2] * 6
    for ttft, gaps in zip(result["ttfts"], result["itls"], strict=True):
        assert ttft + sum(gaps) >= e2el - 0.001
    # Three rounds of two, and every round lasts until the stream's end.
    assert result["duration"] >= 3 * (e2el + TAIL_S)
    assert result["request_goodput"] == 0  # nobody answers within a millisecond
    assert result["request_throughput"] == pytest.approx(6 / result["duration"])
    assert result["generated_texts"] == ["ab cd"] * 6


def test_the_result_file_tells_what_was_run(tmp_path: Path) -> None:
    with FakeServer(slow_and_steady) as server:
        result = run(
            server,
            tmp_path,
            *RANDOM,
            *("--num-prompts", "2", "--request-rate", "100", "--burstiness", "inf"),
            *("--label", "mine", "--metadata", "gpu=none", "note=a=b"),
        )
    assert result["model_id"] == result["tokenizer_id"] == DEFAULT_MODEL
    assert (result["backend"], result["label"]) == ("openai", "mine")
    assert (result["num_prompts"], result["request_rate"]) == (2, 100.0)
    assert (result["burstiness"], result["max_concurrency"]) == ("inf", None)
    assert (result["gpu"], result["note"]) == ("none", "a=b")
    assert len(result["date"]) == len("20261130-120000")


def test_details_are_left_out_and_lines_appended_on_request(tmp_path: Path) -> None:
    flags = ("--num-prompts", "1", "--append-result", "--result-dir", str(tmp_path))
    with FakeServer(slow_and_steady) as server:
        for _ in range(2):
            assert bench(server, *RANDOM, *flags, "--result-filename", "all.jsonl") == 0
        assert bench(server, *RANDOM, "--num-prompts", "1", "--result-dir", str(tmp_path)) == 0
    (file,) = tmp_path.iterdir()  # the third run was not asked to save anything
    lines = [json.loads(line) for line in file.read_text().split("\n")]
    assert [line["completed"] for line in lines] == [1, 1]
    assert "ttfts" not in lines[0]
    assert "mean_ttft_ms" in lines[0]


def test_the_file_is_named_by_what_was_measured(tmp_path: Path) -> None:
    flags = ("--save-result", "--result-dir", str(tmp_path), "--max-concurrency", "3")
    with FakeServer(slow_and_steady) as server:
        assert bench(server, *RANDOM, "--num-prompts", "1", *flags) == 0
    (file,) = tmp_path.iterdir()
    assert file.name.startswith(f"openai-infqps-concurrency3-{DEFAULT_MODEL}-")


def test_the_concurrency_limit_holds(tmp_path: Path) -> None:
    async def handler(request: Request) -> Response:
        if request.path == "/v1/models":
            return json_response(MODELS)
        return stream(0.05, chunk("a"), DONE)

    for limit in (1, 4):
        with FakeServer(handler) as server:
            run(server, tmp_path, *RANDOM, "--num-prompts", "12", "--max-concurrency", str(limit))
            assert server.max_concurrent == limit
    with FakeServer(handler) as server:
        run(server, tmp_path, *RANDOM, "--num-prompts", "12")
        assert server.max_concurrent > 4


def test_the_rate_is_kept(tmp_path: Path) -> None:
    """Twenty requests at 50 a second: the last goes out 0.4 s after the start, no sooner."""
    with FakeServer(slow_and_steady) as server:
        result = run(server, tmp_path, *RANDOM, "--num-prompts", "20", "--request-rate", "50")
    starts = result["start_times"]
    assert starts == sorted(starts)
    assert 0.4 <= result["duration"] <= 0.4 + 5.0
    # From the first to the last: 0.4 s less the first one's own delay.
    assert 0.2 <= starts[-1] - starts[0] <= 4.0


def test_warm_up_requests_are_sent_and_not_counted(tmp_path: Path) -> None:
    with FakeServer(slow_and_steady) as server:
        result = run(server, tmp_path, *RANDOM, "--num-prompts", "2", "--num-warmups", "3")
        posts = [request for request in server.requests if request.method == "POST"]
    assert result["completed"] == 2
    prompts = [request.json()["prompt"] for request in posts]
    assert len(prompts) == 5
    assert len(set(prompts[:3])) == 1  # the first prompt, three times
    ids = [request.headers.get("x-request-id") for request in posts]
    assert ids[:3] == [None] * 3
    assert sorted(filter(None, ids)) == ["bench-0", "bench-1"]


def test_random_prompts_ask_for_all_their_tokens_and_flags_go_into_the_body(
    tmp_path: Path,
) -> None:
    flags = ("--num-prompts", "1", "--temperature", "0", "--extra-body", '{"cache_salt": "x"}')
    with FakeServer(slow_and_steady) as server:
        run(server, tmp_path, *RANDOM, *flags, "--header", "X-A=b")
        (post,) = [request for request in server.requests if request.method == "POST"]
    body = post.json()
    assert body["ignore_eos"] is True
    assert body["max_tokens"] == 4
    assert body["temperature"] == 0
    assert body["cache_salt"] == "x"
    assert post.headers["x-a"] == "b"


def test_chat_goes_to_the_chat_endpoint(tmp_path: Path) -> None:
    async def handler(request: Request) -> Response:
        assert request.path == "/v1/chat/completions"
        return stream(chat_chunk(None, role="assistant"), chat_chunk("hi"), usage(5, 2), DONE)

    file = tmp_path / "prompts.txt"
    file.write_text("How are you?\n")
    with FakeServer(handler) as server:
        result = run(
            server,
            tmp_path,
            *("--backend", "openai-chat", "--model", "any", "--skip-tokenizer-init"),
            *("--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "1"),
        )
        messages = server.requests[0].json()["messages"]
    assert messages == [{"role": "user", "content": "How are you?"}]
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (5, 2)


def test_the_table_goes_to_standard_output_and_the_bar_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--num-prompts", "3", "--num-warmups", "1", "--metric-percentiles", "50,99.5")
    with FakeServer(slow_and_steady) as server:
        args = ["bench", "serve", "--base-url", server.url, *RANDOM, *flags]
        assert main([*args, "--goodput", "ttft:9000"]) == 0
    captured = capsys.readouterr()
    assert "Requests" in captured.err
    assert "3/3" in captured.err
    assert "Warm-up" in captured.err
    lines = captured.out.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    rows = [line.rsplit(":", 1) for line in lines if ":" in line]
    table = {name: value.strip() for name, value in rows}
    assert table["Successful requests"] == "3"
    assert table["Total input tokens"] == "27"
    assert table["Total generated tokens"] == "12"
    assert table["Request goodput (req/s)"] == table["Request throughput (req/s)"]
    assert float(table["Mean TTFT (ms)"]) >= FIRST_TOKEN_S * 1000
    assert float(table["P50 TTFT (ms)"]) <= float(table["P99.5 TTFT (ms)"])
    assert {"Mean TPOT (ms)", "Mean ITL (ms)"} <= set(table)


def test_failed_requests_are_counted_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turn = iter(range(100))

    async def handler(request: Request) -> Response:
        if request.path == "/v1/models":
            return json_response(MODELS)
        if next(turn) % 2:
            return json_response({"error": {"message": "too busy"}}, 503)
        return stream(chunk("a"), usage(3, 1), DONE)

    with FakeServer(handler) as server:
        result = run(server, tmp_path, *RANDOM, "--num-prompts", "6", "--max-concurrency", "1")
    assert (result["completed"], result["failed"]) == (3, 3)
    assert result["total_input_tokens"] == 9
    captured = capsys.readouterr()
    assert captured.err.count("HTTP 503: too busy") == 3
    assert "Failed requests:                         3" in captured.out


def test_a_run_in_which_everything_fails_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def handler(request: Request) -> Response:
        if request.path == "/v1/models":
            return json_response(MODELS)
        return stream(chunk("a"), event({"error": {"message": "engine died"}}))

    with FakeServer(handler) as server:
        assert bench(server, *RANDOM, "--num-prompts", "2") == 2
        assert "all 2 requests failed" in capsys.readouterr().err
        assert bench(server, *RANDOM, "--num-prompts", "2", "--num-warmups", "1") == 2
        assert "no warm-up request succeeded" in capsys.readouterr().err


def test_the_ready_check_waits_for_the_server(tmp_path: Path) -> None:
    turn = iter(range(100))

    async def handler(request: Request) -> Response:
        if next(turn) < 1:
            return json_response({"error": "loading"}, 503)
        return stream(chunk("a"), usage(3, 1), DONE)

    with FakeServer(handler) as server:
        flags = ("--model", DEFAULT_MODEL, "--ready-check-timeout-sec", "10")
        result = run(server, tmp_path, *RANDOM, "--num-prompts", "2", *flags)
        assert len(server.requests) == 2 + 2
    assert (result["completed"], result["failed"]) == (2, 0)


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    async def handler(request: Request) -> Response:
        return json_response({"data": []})

    with FakeServer(handler) as server:
        assert bench(server) == 2
        assert "lists no model" in capsys.readouterr().err
    assert bench(server) == 2  # it has gone
    assert "is the server running?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
        (["--burstiness", "-1"], "--burstiness must be above 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--goodput", "itl:5"], "--goodput 'itl:5'"),
        (["--metadata", "x"], "KEY=VALUE"),
        (["--dataset-name", "custom"], "--dataset-path is needed"),
        (["--dataset-path", "x"], "goes with --dataset-name custom"),
        (["--dataset-name", "custom", "--dataset-path", "/no/such"], "cannot be read"),
        (["--tokenizer", "/no/such"], "not a local model"),
        (["--skip-tokenizer-init"], "leaves nothing to make random prompts of"),
        (
            ["--dataset-name", "prefix_repetition", "--num-prompts", "3"],
            "num_prefixes|num-prefixes",
        ),
        (["--random-range-ratio", "1"], "must be in \\[0, 1\\)"),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_a_request_is_sent(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    with FakeServer(slow_and_steady) as server:
        assert bench(server, "--model", DEFAULT_MODEL, *args) == 2
        assert server.requests == []
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--percentile-metrics", "ttft,speed"], "names something else"),
        (["--metric-percentiles", "101"], "50,99"),
        (["--extra-body", "[1]"], "not a JSON object"),
        (["--extra-body", "{"], "not JSON"),
    ],
)
def test_flags_that_cannot_be_read_are_refused(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", *args])
    assert message in capsys.readouterr().err


# ---- the prompts ----


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return get_tokenizer(resolve_model(DEFAULT_MODEL))


def test_random_prompts_have_their_length_and_share_only_the_prefix(tokenizer: Any) -> None:
    requests = RandomDataset(3).sample(
        tokenizer, 40, input_len=50, output_len=20, range_ratio=0.5, prefix_len=16
    )
    assert len({request.prompt for request in requests}) == 40
    lens = [request.prompt_len for request in requests]
    assert all(16 + 25 - 3 <= n <= 16 + 75 + 3 for n in lens)  # re-encoding may miss by a few
    assert max(lens) - min(lens) > 20
    assert all(10 <= request.expected_output_len <= 30 for request in requests)
    for request in requests:
        assert request.prompt_len == len(tokenizer.encode(request.prompt))
    first = [tokenizer.encode(request.prompt)[:12] for request in requests]
    assert all(tokens == first[0] for tokens in first)
    assert len({tuple(tokenizer.encode(request.prompt)[16:24]) for request in requests}) > 35


def test_lengths_are_met_but_for_tokens_that_are_no_text_of_their_own(tokenizer: Any) -> None:
    """Single bytes of a character decode to a replacement character, which is three bytes again."""
    requests = RandomDataset(0).sample(tokenizer, 40, input_len=64, output_len=8)
    lens = [request.prompt_len for request in requests]
    assert lens.count(64) >= 35
    assert all(abs(n - 64) <= 4 for n in lens)
    assert [request.expected_output_len for request in requests] == [8] * 40


def test_prompts_depend_on_the_seed_alone(tokenizer: Any) -> None:
    for dataset in (RandomDataset, PrefixRepetitionRandomDataset):
        one, again, other = [
            [request.prompt for request in dataset(seed).sample(tokenizer, 12)]
            for seed in (1, 1, 2)
        ]
        assert one == again != other


def test_shared_prefixes_are_shared_equally_and_in_mixed_order(tokenizer: Any) -> None:
    requests = PrefixRepetitionRandomDataset(5).sample(
        tokenizer, 23, prefix_len=40, suffix_len=10, num_prefixes=4, output_len=6
    )
    assert len(requests) == 23
    prefixes = [tuple(tokenizer.encode(request.prompt)[:36]) for request in requests]
    counts = sorted(prefixes.count(prefix) for prefix in set(prefixes))
    assert counts == [5, 6, 6, 6]
    assert any(prefixes[i] != prefixes[i % 4] for i in range(23))  # not one after the other
    assert len({request.prompt for request in requests}) == 23
    assert {request.expected_output_len for request in requests} == {6}


def test_a_file_gives_prompts_and_lengths(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a cat", "output_tokens": 5}\n\n{"prompt": "a dog\\nran"}\n')
    dataset = CustomDataset(str(file), shuffle=False)
    requests = dataset.sample(tokenizer, 2, skip_chat_template=True, request_id_prefix="r")
    assert [request.prompt for request in requests] == ["a cat", "a dog\nran"]
    assert [request.expected_output_len for request in requests] == [5, 256]
    assert [request.prompt_len for request in requests] == [
        len(tokenizer.encode("a cat")),
        len(tokenizer.encode("a dog\nran")),
    ]
    assert [request.request_id for request in requests] == ["r0", "r1"]
    templated = dataset.sample(tokenizer, 1, output_len=9)[0]
    assert templated.prompt.startswith("<|im_start|>user\na cat")
    assert templated.expected_output_len == 9


def test_a_short_file_is_used_again(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    requests = CustomDataset(str(file)).sample(tokenizer, 7, skip_chat_template=True)
    assert [request.request_id for request in requests] == [str(i) for i in range(7)]
    assert {request.prompt for request in requests[:2]} == {"one", "two"}
    assert {request.prompt for request in requests[2:]} <= {"one", "two"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("{", "line 1 is not JSON"),
        ('\n{"text": "a"}', "line 2 is not an object"),
        ('{"prompt": "a", "output_tokens": "5"}', "output_tokens must be an integer"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(VLLMValidationError, match=message):
        CustomDataset(str(file))


def test_the_flags_do_not_need_what_they_start() -> None:
    """`nanovllm --help` imports neither numpy nor httpx."""
    import subprocess
    import sys

    program = (
        "import sys; from nanovllm.entrypoints.cli.main import make_parser; make_parser(); "
        "sys.exit(bool({'numpy', 'httpx', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_run_can_be_cancelled(tmp_path: Path) -> None:
    """Ctrl-C ends it at once, although the server would go on for ever."""
    import numpy as np

    from nanovllm.benchmarks import serve
    from nanovllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput

    async def handler(request: Request) -> Response:
        return stream(chunk("a"), 60.0, DONE)

    async def go(url: str) -> None:
        import httpx

        template = RequestFuncInput("", f"{url}/v1/completions", 0, 0, "m")
        samples = [serve.SampleRequest("p", 1, 1)] * 3
        times = serve.get_arrival_times(3, 1000.0, 1.0, np.random.default_rng(0))
        async with httpx.AsyncClient() as client:
            func = ASYNC_REQUEST_FUNCS["openai"]
            task = serve.benchmark(func, client, template, samples, times, disable_tqdm=True)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0.3)

    with FakeServer(handler) as server:
        asyncio.run(asyncio.wait_for(go(server.url), 60))
