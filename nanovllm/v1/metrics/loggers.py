"""What becomes of a step's statistics: a line in the log now and then, and Prometheus metrics.

    AsyncLLM, after every step
      -> StatLoggerManager.record(scheduler_stats, iteration_stats, engine_idx)
           -> LoggingStatLogger      sums; one line whenever `log` is called (every 10 s)
           -> PrometheusStatLogger   counters, gauges and histograms; read by GET /metrics

Metrics and labels are named as in vLLM, so that its Grafana dashboard shows this engine, too.
Upstream's preemption count never appears in its line (it is set to zero just before); ours does.

Upstream: vllm/v1/metrics/loggers.py (0.23.0)
Left out: plugins, aggregation over data-parallel engines, multimodal, LoRA, KV-connector,
speculative-decoding, sleep-state and block-residency metrics, prompt tokens from another
instance's cache, waiting requests by reason, hidden (deprecated) metrics.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm.v1.engine import FinishReason
from nanovllm.v1.metrics.prometheus import get_prometheus_registry
from nanovllm.v1.metrics.stats import (
    CachingMetrics,
    FinishedRequestStats,
    IterationStats,
    SchedulerStats,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from nanovllm.config import VllmConfig

logger = logging.getLogger(__name__)

# Seconds between two lines of the log.
LOG_STATS_INTERVAL = 10.0

# Bucket bounds, all upstream's. Seconds:
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_LATENCY_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# Tokens, and samples of a request:
ITERATION_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)


def build_1_2_5_buckets(max_value: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, 100, ... as far as `max_value`."""
    buckets: list[int] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > max_value:
                return buckets
            buckets.append(mantissa * power)
        power *= 10


class StatLoggerBase(ABC):
    """Something that is told of every step of one engine."""

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
    ) -> None:
        """Take in a step. Either may be None: a step without outputs has no iteration stats."""

    def log(self) -> None:  # noqa: B027  # not every logger has something to say
        """Say what has been recorded since the last call."""

    def log_engine_initialized(self) -> None:  # noqa: B027
        """The KV cache's size is known from now on."""


StatLoggerFactory = Callable[["VllmConfig", int], StatLoggerBase]


class LoggingStatLogger(StatLoggerBase):
    """One line about the time since the line before: throughput, queues, cache.

    Prompt throughput counts tokens that were computed, not those found in the prefix cache.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.vllm_config = vllm_config
        self.engine_index = engine_index
        self.last_scheduler_stats = SchedulerStats()
        self.prefix_caching_metrics = CachingMetrics()  # over requests, not over the interval
        self.last_prompt_throughput = 0.0
        self.last_generation_throughput = 0.0
        self._reset(time.monotonic())

    def _reset(self, now: float) -> None:
        self.last_log_time = now
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_preemptions = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
    ) -> None:
        if iteration_stats is not None:
            self.num_prompt_tokens += iteration_stats.prompt_token_stats.computed
            self.num_generation_tokens += iteration_stats.num_generation_tokens
            self.num_preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.prefix_caching_metrics.observe(scheduler_stats.prefix_cache_stats)
            self.last_scheduler_stats = scheduler_stats

    def log(self) -> None:
        """Write the line, at INFO; at DEBUG if nothing happened in this interval and the last."""
        now = time.monotonic()
        interval = max(now - self.last_log_time, 1e-9)
        prompt_throughput = self.num_prompt_tokens / interval
        generation_throughput = self.num_generation_tokens / interval
        num_preemptions = self.num_preemptions
        is_idle = not (
            prompt_throughput
            or generation_throughput
            or self.last_prompt_throughput
            or self.last_generation_throughput
        )
        self.last_prompt_throughput = prompt_throughput
        self.last_generation_throughput = generation_throughput
        self._reset(now)

        stats = self.last_scheduler_stats
        parts = [
            f"Avg prompt throughput: {prompt_throughput:.1f} tokens/s",
            f"Avg generation throughput: {generation_throughput:.1f} tokens/s",
            f"Running: {stats.num_running_reqs} reqs",
            f"Waiting: {stats.num_waiting_reqs} reqs",
            f"GPU KV cache usage: {stats.kv_cache_usage * 100:.1f}%",
            f"Prefix cache hit rate: {self.prefix_caching_metrics.hit_rate * 100:.1f}%",
        ]
        if num_preemptions > 0:
            parts.insert(4, f"Preemptions: {num_preemptions}")
        level = logging.DEBUG if is_idle else logging.INFO
        logger.log(level, "Engine %03d: %s", self.engine_index, ", ".join(parts))

    def log_engine_initialized(self) -> None:
        logger.debug(
            "Engine %03d: %s KV-cache blocks",
            self.engine_index,
            self.vllm_config.cache_config.num_gpu_blocks,
        )


MetricT = TypeVar("MetricT", "Counter", "Gauge", "Histogram")


class PrometheusStatLogger(StatLoggerBase):
    """Every metric once, with a child for every engine: labels `model_name` and `engine`.

        self.counter_prompt_tokens[engine_idx].inc(n)
          -> vllm:prompt_tokens_total{engine="0",model_name="tiny-stories"} n

    Needs prometheus_client (the extra `serve`).
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_indexes: Sequence[int] = (0,),
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`registry`: where the metrics go; None: a new one, found at `self.registry`."""
        self.vllm_config = vllm_config
        self.engine_indexes = list(engine_indexes)
        self.registry = get_prometheus_registry() if registry is None else registry
        self.model_name = vllm_config.model_config.served_model_name or ""
        max_model_len = vllm_config.model_config.max_model_len
        assert max_model_len is not None  # ModelConfig derives it
        self._make_state_metrics()
        self._make_counters()
        self._make_histograms_of_counts(build_1_2_5_buckets(max_model_len))
        self._make_histograms_of_times()

    def _create_metric_per_engine(
        self, metric_cls: type[MetricT], name: str, documentation: str, **kwargs: Any
    ) -> dict[int, MetricT]:
        metric = metric_cls(
            name, documentation, ["model_name", "engine"], registry=self.registry, **kwargs
        )
        return {i: metric.labels(self.model_name, str(i)) for i in self.engine_indexes}

    def _create_counters_by(
        self, label: str, values: Sequence[str], name: str, documentation: str
    ) -> dict[str, dict[int, Counter]]:
        """Counters with one more label: by its value, then by engine."""
        from prometheus_client import Counter

        counter = Counter(
            name, documentation, ["model_name", "engine", label], registry=self.registry
        )
        return {
            value: {i: counter.labels(self.model_name, str(i), value) for i in self.engine_indexes}
            for value in values
        }

    def _make_state_metrics(self) -> None:
        from prometheus_client import Counter, Gauge

        create = self._create_metric_per_engine
        self.gauge_scheduler_running = create(
            Gauge, "vllm:num_requests_running", "Requests that the scheduler is running."
        )
        self.gauge_scheduler_waiting = create(
            Gauge, "vllm:num_requests_waiting", "Requests that wait to be run."
        )
        self.gauge_kv_cache_usage = create(
            Gauge, "vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it."
        )
        self.counter_prefix_cache_queries = create(
            Counter, "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."
        )
        self.counter_prefix_cache_hits = create(
            Counter, "vllm:prefix_cache_hits", "Tokens found in the prefix cache."
        )

    def _make_counters(self) -> None:
        from prometheus_client import Counter

        create = self._create_metric_per_engine
        self.counter_num_preempted_reqs = create(
            Counter, "vllm:num_preemptions", "Times a running request lost its blocks."
        )
        self.counter_prompt_tokens = create(
            Counter, "vllm:prompt_tokens", "Prompt tokens, cached ones included."
        )
        self.counter_prompt_tokens_by_source = self._create_counters_by(
            "source",
            ("local_compute", "local_cache_hit"),
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from.",
        )
        self.counter_prompt_tokens_cached = create(
            Counter, "vllm:prompt_tokens_cached", "Prompt tokens that were not computed."
        )
        self.counter_generation_tokens = create(
            Counter, "vllm:generation_tokens", "Tokens generated."
        )
        self.counter_request_success = self._create_counters_by(
            "finished_reason",
            [str(reason) for reason in FinishReason],
            "vllm:request_success",
            "Requests that ended, by how.",
        )

    def _make_histograms_of_counts(self, token_buckets: list[int]) -> None:
        from prometheus_client import Histogram

        def create(
            name: str, documentation: str, buckets: Sequence[int] = token_buckets
        ) -> dict[int, Histogram]:
            return self._create_metric_per_engine(Histogram, name, documentation, buckets=buckets)

        self.histogram_num_prompt_tokens_request = create(
            "vllm:request_prompt_tokens", "Prompt tokens of a request."
        )
        self.histogram_num_generation_tokens_request = create(
            "vllm:request_generation_tokens", "Tokens generated for a sample of a request."
        )
        self.histogram_prefill_kv_computed_request = create(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of a request not cached."
        )
        self.histogram_max_num_generation_tokens_request = create(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest sample."
        )
        self.histogram_max_tokens_request = create(
            "vllm:request_params_max_tokens", "The request parameter max_tokens."
        )
        self.histogram_n_request = create(
            "vllm:request_params_n", "The request parameter n.", N_BUCKETS
        )
        self.histogram_iteration_tokens = create(
            "vllm:iteration_tokens_total",
            "Prompt tokens computed and tokens generated in a step.",
            ITERATION_TOKENS_BUCKETS,
        )

    def _make_histograms_of_times(self) -> None:
        from prometheus_client import Histogram

        def create(name: str, documentation: str, buckets: Sequence[float]) -> dict[int, Histogram]:
            return self._create_metric_per_engine(Histogram, name, documentation, buckets=buckets)

        self.histogram_time_to_first_token = create(
            "vllm:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self.histogram_inter_token_latency = create(
            "vllm:inter_token_latency_seconds",
            "Seconds between two outputs of a request.",
            TOKEN_LATENCY_BUCKETS,
        )
        self.histogram_request_time_per_output_token = create(
            "vllm:request_time_per_output_token_seconds",
            "Mean seconds a token of a request, the first left out.",
            TOKEN_LATENCY_BUCKETS,
        )
        self.histogram_e2e_time_request = create(
            "vllm:e2e_request_latency_seconds",
            "Seconds from a request's arrival to its end.",
            REQUEST_LATENCY_BUCKETS,
        )
        self.histogram_queue_time_request = create(
            "vllm:request_queue_time_seconds",
            "Seconds a request waited before it was first scheduled.",
            REQUEST_LATENCY_BUCKETS,
        )
        self.histogram_inference_time_request = create(
            "vllm:request_inference_time_seconds",
            "Seconds from first scheduled to last token.",
            REQUEST_LATENCY_BUCKETS,
        )
        self.histogram_prefill_time_request = create(
            "vllm:request_prefill_time_seconds",
            "Seconds from first scheduled to first token.",
            REQUEST_LATENCY_BUCKETS,
        )
        self.histogram_decode_time_request = create(
            "vllm:request_decode_time_seconds",
            "Seconds from first to last token.",
            REQUEST_LATENCY_BUCKETS,
        )

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats, engine_idx)
        if iteration_stats is not None:
            self._record_iteration(iteration_stats, engine_idx)
            for finished_request in iteration_stats.finished_requests:
                self._record_finished(finished_request, engine_idx)

    def _record_scheduler(self, stats: SchedulerStats, engine_idx: int) -> None:
        self.gauge_scheduler_running[engine_idx].set(stats.num_running_reqs)
        self.gauge_scheduler_waiting[engine_idx].set(stats.num_waiting_reqs)
        self.gauge_kv_cache_usage[engine_idx].set(stats.kv_cache_usage)
        prefix = stats.prefix_cache_stats
        self.counter_prefix_cache_queries[engine_idx].inc(prefix.queries)
        self.counter_prefix_cache_hits[engine_idx].inc(prefix.hits)

    def _record_iteration(self, stats: IterationStats, engine_idx: int) -> None:
        prompt = stats.prompt_token_stats
        by_source = self.counter_prompt_tokens_by_source
        self.counter_num_preempted_reqs[engine_idx].inc(stats.num_preempted_reqs)
        self.counter_prompt_tokens[engine_idx].inc(stats.num_prompt_tokens)
        by_source["local_compute"][engine_idx].inc(prompt.computed)
        by_source["local_cache_hit"][engine_idx].inc(prompt.local_cache_hit)
        self.counter_prompt_tokens_cached[engine_idx].inc(prompt.cached_tokens)
        self.counter_generation_tokens[engine_idx].inc(stats.num_generation_tokens)
        self.histogram_iteration_tokens[engine_idx].observe(
            prompt.computed + stats.num_generation_tokens
        )
        for num_tokens in stats.max_num_generation_tokens_iter:
            self.histogram_max_num_generation_tokens_request[engine_idx].observe(num_tokens)
        for n in stats.n_params_iter:
            self.histogram_n_request[engine_idx].observe(n)
        for seconds in stats.time_to_first_tokens_iter:
            self.histogram_time_to_first_token[engine_idx].observe(seconds)
        for seconds in stats.inter_token_latencies_iter:
            self.histogram_inter_token_latency[engine_idx].observe(seconds)

    def _record_finished(self, stats: FinishedRequestStats, engine_idx: int) -> None:
        self.counter_request_success[str(stats.finish_reason)][engine_idx].inc()
        self.histogram_e2e_time_request[engine_idx].observe(stats.e2e_latency)
        self.histogram_queue_time_request[engine_idx].observe(stats.queued_time)
        self.histogram_prefill_time_request[engine_idx].observe(stats.prefill_time)
        self.histogram_inference_time_request[engine_idx].observe(stats.inference_time)
        self.histogram_decode_time_request[engine_idx].observe(stats.decode_time)
        self.histogram_request_time_per_output_token[engine_idx].observe(
            stats.mean_time_per_output_token
        )
        self.histogram_num_prompt_tokens_request[engine_idx].observe(stats.num_prompt_tokens)
        self.histogram_num_generation_tokens_request[engine_idx].observe(
            stats.num_generation_tokens
        )
        self.histogram_prefill_kv_computed_request[engine_idx].observe(
            stats.num_prompt_tokens - stats.num_cached_tokens
        )
        if stats.max_tokens_param:
            self.histogram_max_tokens_request[engine_idx].observe(stats.max_tokens_param)

    def log_engine_initialized(self) -> None:
        """Publish CacheConfig as the labels of a gauge that is always 1, as upstream does."""
        from prometheus_client import Gauge

        info = {name: str(v) for name, v in asdict(self.vllm_config.cache_config).items()}
        gauge = Gauge(
            "vllm:cache_config_info",
            "The engine's CacheConfig.",
            [*info, "engine"],
            registry=self.registry,
        )
        for engine_index in self.engine_indexes:
            gauge.labels(*info.values(), str(engine_index)).set(1)


class StatLoggerManager:
    """All loggers of a front end, behind one `record`.

    loggers of engine 0     LoggingStatLogger, custom ones
    loggers of engine 1     ...                              (a front end may serve several)
    prometheus_logger       one for all of them: an engine is a label there
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_idxs: Sequence[int] | None = None,
        custom_stat_loggers: Sequence[StatLoggerFactory] | None = None,
        enable_default_loggers: bool = True,
    ) -> None:
        """Make the loggers.

        Args:
            custom_stat_loggers: called with (vllm_config, engine index), once an engine.
            enable_default_loggers: False: no LoggingStatLogger. Prometheus metrics are kept
                wherever prometheus_client is installed.
        """
        self.engine_indexes = list(engine_idxs or [0])
        factories: list[StatLoggerFactory] = list(custom_stat_loggers or ())
        if enable_default_loggers and logger.isEnabledFor(logging.INFO):
            factories.append(LoggingStatLogger)
        self.per_engine_stat_loggers = {
            i: [factory(vllm_config, i) for factory in factories] for i in self.engine_indexes
        }
        self.prometheus_logger: PrometheusStatLogger | None = None
        if importlib.util.find_spec("prometheus_client") is not None:
            self.prometheus_logger = PrometheusStatLogger(vllm_config, self.engine_indexes)

    @property
    def prometheus_registry(self) -> CollectorRegistry | None:
        """What `prometheus.render` takes; None without prometheus_client."""
        return None if self.prometheus_logger is None else self.prometheus_logger.registry

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        engine_idx: int = 0,
    ) -> None:
        """Tell the loggers of one engine about a step of it."""
        for stat_logger in self._loggers_of(engine_idx):
            stat_logger.record(scheduler_stats, iteration_stats, engine_idx)

    def log(self) -> None:
        for stat_loggers in self.per_engine_stat_loggers.values():
            for stat_logger in stat_loggers:
                stat_logger.log()

    async def log_forever(self, interval: float = LOG_STATS_INTERVAL) -> None:
        """Log every `interval` seconds until cancelled."""
        while True:
            await asyncio.sleep(interval)
            self.log()

    def log_engine_initialized(self) -> None:
        for stat_loggers in self.per_engine_stat_loggers.values():
            for stat_logger in stat_loggers:
                stat_logger.log_engine_initialized()
        if self.prometheus_logger is not None:
            self.prometheus_logger.log_engine_initialized()

    def _loggers_of(self, engine_idx: int) -> list[StatLoggerBase]:
        stat_loggers = self.per_engine_stat_loggers[engine_idx]
        if self.prometheus_logger is None:
            return stat_loggers
        return [*stat_loggers, self.prometheus_logger]
