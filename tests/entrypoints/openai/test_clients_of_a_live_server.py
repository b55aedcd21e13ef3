"""`nanovllm bench serve`, `nanovllm chat --url` and a Prometheus scrape, all on the real server."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from live_server import MODEL, LiveServer
from prometheus_client.parser import text_string_to_metric_families

from nanovllm import LLM, SamplingParams
from nanovllm.entrypoints.cli.main import main


def scrape(server: LiveServer) -> dict[str, float]:
    """`name` or `name{label value}` of what is no label of every metric -> value."""
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:") and sample.name != "vllm:cache_config_info":
                assert labels.pop("model_name") == MODEL
                assert labels.pop("engine") == "0"
            if not sample.name.endswith("_bucket"):
                name = sample.name.removeprefix("vllm:")
                samples[" ".join([name, *map(str, labels.values())])] = sample.value
    return samples


class Difference:
    """What a block of code adds to the metrics."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server

    def __enter__(self) -> Difference:
        self._before = scrape(self._server)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.wait_until_idle()
        self._after = scrape(self._server)

    def __getitem__(self, name: str) -> float:
        return self._after[name] - self._before[name]


def test_the_client_and_the_server_count_the_same(server: LiveServer, tmp_path: Path) -> None:
    flags = ["--num-prompts", "10", "--input-len", "40", "--output-len", "6", "--temperature", "0"]
    flags += ["--save-result", "--save-detailed", "--result-dir", str(tmp_path)]
    flags += ["--result-filename", "r.json", "--disable-tqdm", "--max-concurrency", "4"]
    with Difference(server) as added:
        assert main(["bench", "serve", "--base-url", server.url, *flags]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (10, 0)
    assert result["model_id"] == MODEL
    assert result["total_output_tokens"] == added["generation_tokens_total"] == 60
    assert result["total_input_tokens"] == added["prompt_tokens_total"]
    assert added["request_success_total length"] == 10
    assert added["request_generation_tokens_sum"] == 60
    assert added["request_params_max_tokens_sum"] == 60
    assert added["time_to_first_token_seconds_count"] == 10
    assert added["inter_token_latency_seconds_count"] == 50
    assert added["prompt_tokens_total"] == (
        added["prompt_tokens_by_source_total local_compute"]
        + added["prompt_tokens_by_source_total local_cache_hit"]
    )
    # The client starts its clock before the server does, and stops it after.
    assert sum(result["ttfts"]) > added["time_to_first_token_seconds_sum"] > 0
    assert max(result["output_lens"]) == 6


def test_the_prefix_cache_shows_in_the_metrics(server: LiveServer) -> None:
    body = {"model": MODEL, "prompt": list(range(100, 165)), "max_tokens": 2, "ignore_eos": True}
    with Difference(server) as added:
        for _ in range(2):
            assert server.post("/v1/completions", **body).status_code == 200
    assert added["prefix_cache_queries_total"] == 130
    assert added["prefix_cache_hits_total"] == added["prompt_tokens_cached_total"] == 64
    assert added["request_prefill_kv_computed_tokens_sum"] == 130 - 64


def test_samples_of_one_request_are_one_request(server: LiveServer) -> None:
    body = {"model": MODEL, "prompt": "a cat", "max_tokens": 3, "ignore_eos": True, "n": 3}
    with Difference(server) as added:
        assert server.post("/v1/completions", **body).status_code == 200
    assert added["request_params_n_sum"] == 3
    assert added["request_params_n_count"] == 1
    assert added["request_max_num_generation_tokens_sum"] == 3
    assert added["request_success_total length"] == 3
    assert added["generation_tokens_total"] == 9


def test_an_idle_server_runs_nothing(server: LiveServer) -> None:
    now = scrape(server)
    assert now["num_requests_running"] == now["num_requests_waiting"] == 0
    assert now["kv_cache_usage_perc"] == 0
    assert now["process_resident_memory_bytes"] > 0


def test_chat_with_a_server_is_chat_with_the_model(
    server: LiveServer,
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    conversation: list[Any] = [{"role": "user", "content": "Tell me a story."}]
    expected = []
    for message in ("And then?", ""):
        params = SamplingParams(temperature=0, max_tokens=10)
        text = llm.chat(conversation, params, use_tqdm=False)[0].outputs[0].text
        expected.append(text)
        conversation.append({"role": "assistant", "content": text})
        conversation.append({"role": "user", "content": message})
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me a story.\nAnd then?\n"))
    flags = ["--temperature", "0", "--max-tokens", "10"]
    assert main(["chat", "--url", server.url, *flags]) == 0
    assert capsys.readouterr().out == f"{expected[0]}\n{expected[1]}\n"


def test_chat_quotes_the_servers_refusal(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", server.url, "--model-name", "gpt-9", "-q", "hi"]) == 2
    assert "HTTP 404" in capsys.readouterr().err
    assert main(["chat", "--url", server.url, "-q", "word " * 2000]) == 2
    assert "HTTP 400" in capsys.readouterr().err
