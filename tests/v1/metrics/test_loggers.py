"""Loggers: hand-made statistics in, every counter, gauge and histogram checked."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanovllm import EngineArgs, SamplingParams
from nanovllm.config import VllmConfig
from nanovllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
)
from nanovllm.v1.metrics import loggers
from nanovllm.v1.metrics.loggers import (
    LoggingStatLogger,
    PrometheusStatLogger,
    StatLoggerBase,
    StatLoggerManager,
    build_1_2_5_buckets,
)
from nanovllm.v1.metrics.prometheus import render
from nanovllm.v1.metrics.stats import (
    CachingMetrics,
    FinishedRequestStats,
    IterationStats,
    PrefillStats,
    PrefixCacheStats,
    PromptTokenStats,
    RequestStateStats,
    SchedulerStats,
)


@pytest.fixture(scope="module")
def vllm_config() -> VllmConfig:
    return EngineArgs(device="cpu", served_model_name="tale").create_engine_config()


def scrape(
    prometheus: PrometheusStatLogger,
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a scrape says, parsed: (sample name, its labels) -> value."""
    body, content_type = render(prometheus.registry)
    assert content_type.startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


class Scrape:
    """Read samples by short names: `of("prompt_tokens_total")`."""

    def __init__(self, prometheus: PrometheusStatLogger, engine: int = 0) -> None:
        self.samples = scrape(prometheus)
        self.engine = engine

    def of(self, name: str, **labels: str) -> float:
        labels |= {"model_name": "tale", "engine": str(self.engine)}
        return self.samples["vllm:" + name, tuple(sorted(labels.items()))]

    def buckets(self, name: str) -> dict[float, float]:
        """Upper bound -> how many observations lie at or below it."""
        full = f"vllm:{name}_bucket"
        return {
            float(dict(labels)["le"]): value
            for (sample, labels), value in self.samples.items()
            if sample == full and dict(labels)["engine"] == str(self.engine)
        }

    def observations(self, name: str) -> tuple[float, float]:
        return self.of(name + "_count"), self.of(name + "_sum")


FINISHED = FinishedRequestStats(
    finish_reason=FinishReason.STOP,
    e2e_latency=2.25,
    num_prompt_tokens=48,
    num_generation_tokens=9,
    max_tokens_param=64,
    queued_time=0.4,
    prefill_time=0.6,
    inference_time=1.75,
    decode_time=1.15,
    mean_time_per_output_token=0.14,
    num_cached_tokens=32,
)

# (histogram, what FINISHED adds to it)
OF_FINISHED = {
    "e2e_request_latency_seconds": 2.25,
    "request_queue_time_seconds": 0.4,
    "request_prefill_time_seconds": 0.6,
    "request_inference_time_seconds": 1.75,
    "request_decode_time_seconds": 1.15,
    "request_time_per_output_token_seconds": 0.14,
    "request_prompt_tokens": 48,
    "request_generation_tokens": 9,
    "request_prefill_kv_computed_tokens": 16,
    "request_params_max_tokens": 64,
}


@pytest.fixture
def prometheus(vllm_config: VllmConfig) -> PrometheusStatLogger:
    return PrometheusStatLogger(vllm_config)


def test_the_schedulers_state_is_the_last_one_and_its_lookups_add_up(
    prometheus: PrometheusStatLogger,
) -> None:
    for running, waiting, usage in ((3, 7, 0.5), (2, 1, 0.25)):
        stats = SchedulerStats(running, waiting, usage, PrefixCacheStats(2, queries=40, hits=16))
        prometheus.record(stats, None)
    now = Scrape(prometheus)
    assert now.of("num_requests_running") == 2
    assert now.of("num_requests_waiting") == 1
    assert now.of("kv_cache_usage_perc") == 0.25
    assert now.of("prefix_cache_queries_total") == 80
    assert now.of("prefix_cache_hits_total") == 32
    # A step without iteration stats is no iteration.
    assert now.observations("iteration_tokens_total") == (0, 0)


def test_the_tokens_of_iterations_add_up(prometheus: PrometheusStatLogger) -> None:
    first = IterationStats(
        num_generation_tokens=2,
        prompt_token_stats=PromptTokenStats(computed=20, local_cache_hit=16, total=36),
        num_preempted_reqs=1,
        time_to_first_tokens_iter=[0.03, 0.7],
    )
    second = IterationStats(
        num_generation_tokens=5, num_preempted_reqs=2, inter_token_latencies_iter=[0.02, 0.02, 3.0]
    )
    prometheus.record(None, first)
    prometheus.record(None, second)
    now = Scrape(prometheus)
    assert now.of("prompt_tokens_total") == 36
    assert now.of("prompt_tokens_cached_total") == 16
    assert now.of("prompt_tokens_by_source_total", source="local_compute") == 20
    assert now.of("prompt_tokens_by_source_total", source="local_cache_hit") == 16
    assert now.of("generation_tokens_total") == 7
    assert now.of("num_preemptions_total") == 3
    # Cached tokens are no work: 20 + 2 and 5 tokens.
    assert now.observations("iteration_tokens_total") == (2, 27)
    assert now.buckets("iteration_tokens_total")[8] == 1
    assert now.buckets("iteration_tokens_total")[32] == 2
    assert now.observations("time_to_first_token_seconds") == (2, pytest.approx(0.73))
    assert now.buckets("time_to_first_token_seconds")[0.02] == 0
    assert now.buckets("time_to_first_token_seconds")[0.04] == 1
    assert now.buckets("time_to_first_token_seconds")[0.75] == 2
    assert now.observations("inter_token_latency_seconds") == (3, pytest.approx(3.04))
    assert now.buckets("inter_token_latency_seconds")[0.025] == 2
    assert now.buckets("inter_token_latency_seconds")[5.0] == 3


def test_a_finished_request_is_observed_once_in_every_histogram_of_requests(
    prometheus: PrometheusStatLogger,
) -> None:
    prometheus.record(None, IterationStats(finished_requests=[FINISHED]))
    now = Scrape(prometheus)
    for name, value in OF_FINISHED.items():
        assert now.observations(name) == (1, pytest.approx(value)), name
        for bound, count in now.buckets(name).items():
            assert count == (value <= bound), (name, bound)
    for reason in FinishReason:
        expected = 1 if reason == FinishReason.STOP else 0
        assert now.of("request_success_total", finished_reason=str(reason)) == expected


def test_every_finish_reason_is_counted_under_its_own_name(
    prometheus: PrometheusStatLogger,
) -> None:
    for times, reason in enumerate(FinishReason, start=1):
        finished = [FinishedRequestStats(finish_reason=reason)] * times
        prometheus.record(None, IterationStats(finished_requests=finished))
    now = Scrape(prometheus)
    counts = [
        now.of("request_success_total", finished_reason=name)
        for name in ("stop", "length", "abort", "error")
    ]
    assert counts == [1, 2, 3, 4]
    # None of them asked for max_tokens.
    assert now.observations("request_params_max_tokens") == (0, 0)


def test_requests_with_several_samples_are_counted_whole(
    prometheus: PrometheusStatLogger,
) -> None:
    stats = IterationStats(n_params_iter=[3, 1], max_num_generation_tokens_iter=[120, 7])
    prometheus.record(None, stats)
    now = Scrape(prometheus)
    assert now.observations("request_params_n") == (2, 4)
    assert now.buckets("request_params_n") == {1: 1, 2: 1, 5: 2, 10: 2, 20: 2, math.inf: 2}
    assert now.observations("request_max_num_generation_tokens") == (2, 127)


def test_engines_are_told_apart_by_label(vllm_config: VllmConfig) -> None:
    prometheus = PrometheusStatLogger(vllm_config, engine_indexes=[0, 1])
    prometheus.record(SchedulerStats(num_running_reqs=5), None, engine_idx=1)
    prometheus.record(None, IterationStats(num_generation_tokens=4), engine_idx=0)
    zero, one = Scrape(prometheus, 0), Scrape(prometheus, 1)
    assert (zero.of("num_requests_running"), one.of("num_requests_running")) == (0, 5)
    assert (zero.of("generation_tokens_total"), one.of("generation_tokens_total")) == (4, 0)


def test_two_loggers_in_one_process_share_nothing(vllm_config: VllmConfig) -> None:
    one, other = PrometheusStatLogger(vllm_config), PrometheusStatLogger(vllm_config)
    one.record(None, IterationStats(num_generation_tokens=4))
    assert Scrape(one).of("generation_tokens_total") == 4
    assert Scrape(other).of("generation_tokens_total") == 0


def test_the_bounds_are_upstreams(prometheus: PrometheusStatLogger) -> None:
    now = Scrape(prometheus)
    latency = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960]
    latency += [1920, 7680, math.inf]
    token = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
    token += [20, 40, 80, math.inf]
    first = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
    first += [20, 40, 80, 160, 640, 2560, math.inf]
    for name in ("e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert list(now.buckets(name + "_seconds")) == latency
    assert list(now.buckets("inter_token_latency_seconds")) == token
    assert list(now.buckets("time_to_first_token_seconds")) == first
    steps = [1, *(2**i for i in range(3, 15)), math.inf]
    assert list(now.buckets("iteration_tokens_total")) == steps


@pytest.mark.parametrize(
    ("max_value", "buckets"),
    [(1, [1]), (9, [1, 2, 5]), (100, [1, 2, 5, 10, 20, 50, 100]), (0, [])],
)
def test_token_buckets_go_up_to_the_longest_request(max_value: int, buckets: list[int]) -> None:
    assert build_1_2_5_buckets(max_value) == buckets


# All series that vLLM's Grafana dashboard reads (examples/observability/prometheus_grafana), and a
# few more, as spelled in a scrape.
NAMES = [
    *(
        f"{name}_seconds_{part}"
        for name in ("e2e_request_latency", "inter_token_latency", "time_to_first_token")
        for part in ("bucket", "sum", "count")
    ),
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "iteration_tokens_total_bucket",
    "request_max_num_generation_tokens_sum",
]


def test_a_scrape_parses_and_every_promised_name_is_in_it_before_the_first_request(
    prometheus: PrometheusStatLogger,
) -> None:
    samples = scrape(prometheus)
    for name in NAMES:
        found = [dict(labels) for sample, labels in samples if sample == "vllm:" + name]
        assert found, name
        assert all(labels["model_name"] == "tale" for labels in found)
        assert all(labels["engine"] == "0" for labels in found)
    assert ("process_open_fds", ()) in samples  # the process itself, as in vLLM


def test_names_that_need_escaping_survive_a_scrape() -> None:
    name = 'a "model"\\with\nall of it'
    config = EngineArgs(device="cpu", served_model_name=name).create_engine_config()
    samples = scrape(PrometheusStatLogger(config))
    labels = (("engine", "0"), ("model_name", name))
    assert samples["vllm:num_requests_running", labels] == 0


def test_the_cache_config_is_published_when_the_size_is_known(vllm_config: VllmConfig) -> None:
    prometheus = PrometheusStatLogger(vllm_config)
    vllm_config.cache_config.num_gpu_blocks = 77
    prometheus.log_engine_initialized()
    ((labels, value),) = [
        (dict(labels), value)
        for (name, labels), value in scrape(prometheus).items()
        if name == "vllm:cache_config_info"
    ]
    assert value == 1
    assert labels["num_gpu_blocks"] == "77"
    assert labels["block_size"] == "16"


# ---- IterationStats ----


def _output(num_tokens: int, **kwargs: Any) -> EngineCoreOutput:
    return EngineCoreOutput("r", list(range(num_tokens)), **kwargs)


def test_a_requests_timeline_becomes_its_intervals() -> None:
    """Queued at 100, scheduled at 101, preempted and scheduled again before its first token."""
    moments = RequestStateStats(arrival_time=1000.0)
    kinds = EngineCoreEventType
    first = IterationStats(iteration_timestamp=1004.5)
    events = [
        EngineCoreEvent(kinds.QUEUED, 100.0),
        EngineCoreEvent(kinds.SCHEDULED, 101.0),
        EngineCoreEvent(kinds.PREEMPTED, 102.0),
        EngineCoreEvent(kinds.SCHEDULED, 103.0),
    ]
    prefill = PrefillStats()
    prefill.set(num_prompt_tokens=50, num_cached_tokens=32)
    output = _output(1, events=events, prefill_stats=prefill)
    first.update_from_output(output, 104.0, True, moments)
    assert first.time_to_first_tokens_iter == [4.5]
    assert moments.first_token_latency == 4.5
    assert first.inter_token_latencies_iter == []
    assert first.num_preempted_reqs == 1
    assert (first.num_prompt_tokens, first.num_generation_tokens) == (50, 1)
    assert first.prompt_token_stats == PromptTokenStats(18, 32, 50)
    assert first.prompt_token_stats.cached_tokens == 32

    second = IterationStats(iteration_timestamp=1007.0)
    second.update_from_output(_output(2), 106.0, False, moments)
    third = IterationStats(iteration_timestamp=1010.0)
    third.update_from_output(_output(1), 109.0, False, moments)
    third.update_from_finished_request(FinishReason.LENGTH, "r", 50, 4, moments, 32)
    assert second.inter_token_latencies_iter == [2.0]
    assert third.inter_token_latencies_iter == [3.0]
    assert third.time_to_first_tokens_iter == []
    assert third.finished_requests == [
        FinishedRequestStats(
            finish_reason=FinishReason.LENGTH,
            request_id="r",
            e2e_latency=10.0,
            num_prompt_tokens=50,
            num_generation_tokens=4,
            max_tokens_param=4,
            queued_time=1.0,
            prefill_time=3.0,
            inference_time=8.0,
            decode_time=5.0,
            mean_time_per_output_token=pytest.approx(5.0 / 3),
            num_cached_tokens=32,
        )
    ]


def test_a_request_of_one_token_has_no_time_per_further_token() -> None:
    stats, moments = IterationStats(), RequestStateStats(arrival_time=1.0)
    stats.update_from_output(_output(1), 5.0, True, moments)
    stats.update_from_finished_request(FinishReason.STOP, "r", 3, None, moments)
    assert stats.finished_requests[0].mean_time_per_output_token == 0.0
    assert stats.finished_requests[0].decode_time == 0.0


# ---- the hit rate ----


def test_the_hit_rate_forgets_old_requests_but_never_the_newest_entry() -> None:
    metrics = CachingMetrics(max_recent_requests=10)
    assert metrics.hit_rate == 0.0
    metrics.observe(PrefixCacheStats(requests=6, queries=60, hits=60))
    metrics.observe(PrefixCacheStats(requests=4, queries=40, hits=0))
    assert metrics.hit_rate == pytest.approx(0.6)
    metrics.observe(PrefixCacheStats(requests=0, queries=0, hits=0))
    assert metrics.hit_rate == pytest.approx(0.6)
    metrics.observe(PrefixCacheStats(requests=1, queries=10, hits=5))  # the first six drop out
    assert metrics.hit_rate == pytest.approx(5 / 50)
    metrics.observe(PrefixCacheStats(requests=500, queries=10, hits=1))
    assert metrics.hit_rate == pytest.approx(0.1)


# ---- the line in the log ----


class Clock:
    """time.monotonic that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loggers, "time", clock)
    return clock


@pytest.fixture
def caplog_nanovllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """caplog, also when another test has cut our logger off from the root."""
    ours = logging.getLogger("nanovllm.v1.metrics.loggers")
    level = ours.level
    ours.addHandler(caplog.handler)
    ours.setLevel(logging.DEBUG)
    propagate, ours.propagate = ours.propagate, False
    yield caplog
    ours.removeHandler(caplog.handler)
    ours.setLevel(level)
    ours.propagate = propagate


def test_the_line_tells_of_the_interval_since_the_line_before(
    vllm_config: VllmConfig, clock: Clock, caplog_nanovllm: pytest.LogCaptureFixture
) -> None:
    stat_logger = LoggingStatLogger(vllm_config)
    prompt = PromptTokenStats(computed=300, local_cache_hit=100, total=400)
    scheduler = SchedulerStats(3, 2, 0.125, PrefixCacheStats(1, queries=400, hits=100))
    iteration = IterationStats(num_generation_tokens=50, prompt_token_stats=prompt)
    stat_logger.record(scheduler, iteration)
    stat_logger.record(None, IterationStats(num_generation_tokens=25, num_preempted_reqs=2))
    clock.now = 110.0
    stat_logger.log()
    clock.now = 115.0
    stat_logger.record(None, IterationStats(num_generation_tokens=10))
    stat_logger.log()
    first, second = [record.getMessage() for record in caplog_nanovllm.records]
    assert first == (
        "Engine 000: Avg prompt throughput: 30.0 tokens/s, Avg generation throughput: "
        "7.5 tokens/s, Running: 3 reqs, Waiting: 2 reqs, Preemptions: 2, GPU KV cache usage: "
        "12.5%, Prefix cache hit rate: 25.0%"
    )
    assert "prompt throughput: 0.0" in second
    assert "generation throughput: 2.0" in second
    assert "Preemptions" not in second


def test_an_idle_engine_is_silent_after_one_line_of_zeros(
    vllm_config: VllmConfig, clock: Clock, caplog_nanovllm: pytest.LogCaptureFixture
) -> None:
    stat_logger = LoggingStatLogger(vllm_config)
    stat_logger.record(None, IterationStats(num_generation_tokens=1))
    for _ in range(4):
        clock.now += 10
        stat_logger.log()
    levels = [record.levelno for record in caplog_nanovllm.records]
    assert levels == [logging.INFO, logging.INFO, logging.DEBUG, logging.DEBUG]


# ---- the manager ----


class Recorder(StatLoggerBase):
    def __init__(self, vllm_config: VllmConfig, engine_index: int) -> None:
        self.engine_index = engine_index
        self.records: list[Any] = []
        self.num_logs = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, engine_idx: int = 0) -> None:
        self.records.append((scheduler_stats, iteration_stats, engine_idx))

    def log(self) -> None:
        self.num_logs += 1


def test_the_manager_tells_the_loggers_of_the_engine_and_prometheus(
    vllm_config: VllmConfig,
) -> None:
    made: list[Recorder] = []

    def factory(config: VllmConfig, engine_index: int) -> Recorder:
        made.append(Recorder(config, engine_index))
        return made[-1]

    manager = StatLoggerManager(vllm_config, [0, 1], [factory], enable_default_loggers=False)
    scheduler, iteration = SchedulerStats(), IterationStats(num_generation_tokens=3)
    manager.record(scheduler, iteration, engine_idx=1)
    manager.log()
    assert [logger.engine_index for logger in made] == [0, 1]
    assert made[0].records == []
    assert made[1].records == [(scheduler, iteration, 1)]
    assert [logger.num_logs for logger in made] == [1, 1]
    assert manager.prometheus_logger is not None
    assert Scrape(manager.prometheus_logger, 1).of("generation_tokens_total") == 3


def test_the_manager_logs_by_default_unless_told_not_to(
    vllm_config: VllmConfig, caplog_nanovllm: pytest.LogCaptureFixture
) -> None:
    manager = StatLoggerManager(vllm_config)
    manager.record(None, IterationStats(num_generation_tokens=3))
    manager.log()
    (record,) = caplog_nanovllm.records
    assert re.search(r"generation throughput: [0-9.]+ tokens/s", record.getMessage())
    quiet = StatLoggerManager(vllm_config, enable_default_loggers=False)
    quiet.record(None, IterationStats(num_generation_tokens=3))
    quiet.log()
    assert len(caplog_nanovllm.records) == 1


def test_without_prometheus_client_the_manager_still_logs(
    vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    made: list[Recorder] = []

    def factory(config: VllmConfig, engine_index: int) -> Recorder:
        made.append(Recorder(config, engine_index))
        return made[-1]

    manager = StatLoggerManager(vllm_config, None, [factory])
    manager.record(SchedulerStats(), None)
    manager.log_engine_initialized()
    assert manager.prometheus_registry is None
    assert len(made[0].records) == 1


def test_the_manager_logs_again_and_again_until_cancelled(vllm_config: VllmConfig) -> None:
    made: list[Recorder] = []

    def factory(config: VllmConfig, engine_index: int) -> Recorder:
        made.append(Recorder(config, engine_index))
        return made[-1]

    async def run() -> None:
        manager = StatLoggerManager(vllm_config, None, [factory], enable_default_loggers=False)
        task = asyncio.create_task(manager.log_forever(interval=0.001))
        while made[0].num_logs < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(run(), timeout=10))
    assert made[0].num_logs >= 3


# ---- fed by a live engine ----


def test_a_live_engines_outputs_add_up(vllm_config: VllmConfig) -> None:
    """Five requests through the core: what the metrics say is what the requests were."""
    from nanovllm.v1.engine.core import EngineCore
    from nanovllm.v1.engine.input_processor import InputProcessor

    config = EngineArgs(
        device="cpu", served_model_name="tale", num_gpu_blocks_override=70
    ).create_engine_config()
    core = EngineCore(config, log_stats=True)
    prometheus = PrometheusStatLogger(config)
    processor = InputProcessor(config)
    moments: dict[str, RequestStateStats] = {}
    num_prompt_tokens = 0
    for i in range(5):
        request = processor.process_inputs(
            str(i),
            {"prompt_token_ids": list(range(10, 50 + i))},
            SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True),
        )
        num_prompt_tokens += len(request.prompt_token_ids)
        moments[request.request_id] = RequestStateStats(arrival_time=request.arrival_time)
        core.add_request(request)
    seen: set[str] = set()
    num_steps = 0
    while core.scheduler.has_requests():
        outputs = core.step()
        num_steps += 1
        stats = IterationStats()
        for output in outputs.outputs:
            first = output.request_id not in seen
            seen.add(output.request_id)
            req_stats = moments[output.request_id]
            stats.update_from_output(output, outputs.timestamp, first, req_stats)
            if output.finish_reason is not None:
                stats.update_from_finished_request(
                    output.finish_reason, output.request_id, 40, None, req_stats
                )
        prometheus.record(outputs.scheduler_stats, stats)
    now = Scrape(prometheus)
    assert now.of("prompt_tokens_total") == num_prompt_tokens
    assert now.of("generation_tokens_total") == 3 + 4 + 5 + 6 + 7
    assert now.of("request_success_total", finished_reason="length") == 5
    assert now.observations("time_to_first_token_seconds")[0] == 5
    assert now.observations("inter_token_latency_seconds")[0] == 25 - 5
    assert now.observations("iteration_tokens_total")[0] == num_steps
    assert now.of("num_requests_running") == 0
    assert now.of("kv_cache_usage_perc") == 0
    assert now.of("prefix_cache_queries_total") >= num_prompt_tokens
