"""Numbers that the scheduler and the output processor collect.

A step of the engine gives two of them, and the loggers take both:

    SchedulerStats    what the core sees: queues, cache usage, prefix-cache hits
    IterationStats    what the front end sees: tokens, latencies, requests that ended

Upstream: vllm/v1/metrics/stats.py (0.23.0)
Left out: LoRA, KV-connector, multimodal-cache, eviction and corrupted-request statistics.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanovllm.v1.engine import EngineCoreEventType

if TYPE_CHECKING:
    from nanovllm.v1.engine import EngineCoreOutput, FinishReason


@dataclass
class PrefixCacheStats:
    """Prefix-cache queries since the last look, in tokens. Preempted requests are counted apart.

    As upstream, a waiting request is counted in every step that tries it, admitted or not.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count one lookup of `num_tokens` tokens of which `num_hits` were cached."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


class CachingMetrics:
    """Hit rate over the most recent requests.

        query_queue   (requests, queries, hits) of one step | ... | ... of the newest step
                      dropped from this end while more than max_recent_requests are in it

    The newest entry always stays, however many requests it holds.
    """

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self.max_recent_requests = max_recent_requests
        self.aggregated_requests = 0
        self.aggregated_query_total = 0
        self.aggregated_query_hit = 0
        self.query_queue: deque[tuple[int, int, int]] = deque()

    def observe(self, stats: PrefixCacheStats) -> None:
        """Take in what one step looked up; a step without lookups changes nothing."""
        if stats.requests == 0:
            return
        self._add(stats.requests, stats.queries, stats.hits)
        self.query_queue.append((stats.requests, stats.queries, stats.hits))
        while len(self.query_queue) > 1 and self.aggregated_requests > self.max_recent_requests:
            requests, queries, hits = self.query_queue.popleft()
            self._add(-requests, -queries, -hits)

    @property
    def hit_rate(self) -> float:
        """Hits over queries, both in tokens; 0 before any query."""
        if self.aggregated_query_total == 0:
            return 0.0
        return self.aggregated_query_hit / self.aggregated_query_total

    def _add(self, requests: int, queries: int, hits: int) -> None:
        self.aggregated_requests += requests
        self.aggregated_query_total += queries
        self.aggregated_query_hit += hits


@dataclass
class PrefillStats:
    """How a prompt was filled; counted anew if preempted before the first output."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0

    def set(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = num_cached_tokens
        self.num_computed_tokens = num_prompt_tokens - num_cached_tokens


@dataclass
class SchedulerStats:
    """The scheduler's state after a step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0  # share of the blocks (null block aside) that are held
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)


@dataclass
class RequestStateStats:
    """One request's moments. Times from the front end and the core must not be mixed.

    `arrival_time` is time.time() at arrival; every `*_ts` is time.monotonic().
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # seconds from arrival, front-end clock


@dataclass
class FinishedRequestStats:
    """One request's life, measured when it ended. Times in seconds.

        queued    scheduled      first token             last token
          |--------->|---------------->|--------------------->|
          queued_time   prefill_time         decode_time
                     |------------- inference_time ---------->|

    Preemptions lie inside these intervals. `e2e_latency` is the front end's: from arrival to the
    step that ended it. `mean_time_per_output_token` leaves out the first token, which the prefill
    made; 0 with one token.
    """

    finish_reason: FinishReason
    request_id: str | None = None
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    num_cached_tokens: int = 0


@dataclass
class PromptTokenStats:
    """Where the prompt tokens of an iteration came from: computed + local_cache_hit == total."""

    computed: int = 0
    local_cache_hit: int = 0
    total: int = 0

    @property
    def cached_tokens(self) -> int:
        """Upstream adds tokens that another instance's cache gave."""
        return self.local_cache_hit

    def update_from_output(self, prefill_stats: PrefillStats) -> None:
        self.computed += prefill_stats.num_computed_tokens
        self.local_cache_hit += prefill_stats.num_cached_tokens
        self.total += prefill_stats.num_prompt_tokens


@dataclass
class IterationStats:
    """What the outputs of one step amount to.

    Attributes:
        iteration_timestamp: time.time() when the front end took the outputs up.
        num_generation_tokens: tokens that all requests got.
        prompt_token_stats: the prompts whose first token came in this step.
        num_preempted_reqs: preemptions since the outputs before.
        finished_requests: the requests that ended, one entry a sample.
        max_num_generation_tokens_iter: longest sample of each request that ended as a whole.
        n_params_iter: n of each request that ended as a whole.
        time_to_first_tokens_iter: seconds from arrival, one a first token.
        inter_token_latencies_iter: seconds since the last output, one a later output.
    """

    iteration_timestamp: float = field(default_factory=time.time)
    num_generation_tokens: int = 0
    prompt_token_stats: PromptTokenStats = field(default_factory=PromptTokenStats)
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)
    n_params_iter: list[int] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_token_stats.total

    def update_from_output(
        self,
        output: EngineCoreOutput,
        engine_core_timestamp: float,
        is_prefilling: bool,
        req_stats: RequestStateStats,
    ) -> None:
        """Count one request's output and note its moments in `req_stats`.

        Args:
            engine_core_timestamp: time.monotonic() at the step's end.
            is_prefilling: this is the request's first output.
        """
        self.num_generation_tokens += len(output.new_token_ids)
        req_stats.num_generation_tokens += len(output.new_token_ids)
        for event in output.events or ():
            if event.type == EngineCoreEventType.QUEUED:
                req_stats.queued_ts = event.timestamp
            elif event.type == EngineCoreEventType.PREEMPTED:
                self.num_preempted_reqs += 1
            elif req_stats.scheduled_ts == 0.0:
                # Only the first time: after a preemption it is scheduled again.
                req_stats.scheduled_ts = event.timestamp
        if is_prefilling:
            if output.prefill_stats is not None:
                self.prompt_token_stats.update_from_output(output.prefill_stats)
            req_stats.first_token_latency = self.iteration_timestamp - req_stats.arrival_time
            req_stats.first_token_ts = engine_core_timestamp
            self.time_to_first_tokens_iter.append(req_stats.first_token_latency)
        else:
            self.inter_token_latencies_iter.append(engine_core_timestamp - req_stats.last_token_ts)
        req_stats.last_token_ts = engine_core_timestamp

    def update_from_finished_request(
        self,
        finish_reason: FinishReason,
        request_id: str,
        num_prompt_tokens: int,
        max_tokens_param: int | None,
        req_stats: RequestStateStats,
        num_cached_tokens: int = 0,
    ) -> None:
        """Sum up a request of which `update_from_output` has seen the last output."""
        decode_time = req_stats.last_token_ts - req_stats.first_token_ts
        num_decode_tokens = req_stats.num_generation_tokens - 1
        self.finished_requests.append(
            FinishedRequestStats(
                finish_reason=finish_reason,
                request_id=request_id,
                e2e_latency=self.iteration_timestamp - req_stats.arrival_time,
                num_prompt_tokens=num_prompt_tokens,
                num_generation_tokens=req_stats.num_generation_tokens,
                max_tokens_param=max_tokens_param,
                queued_time=req_stats.scheduled_ts - req_stats.queued_ts,
                prefill_time=req_stats.first_token_ts - req_stats.scheduled_ts,
                inference_time=req_stats.last_token_ts - req_stats.scheduled_ts,
                decode_time=decode_time,
                mean_time_per_output_token=(
                    decode_time / num_decode_tokens if num_decode_tokens > 0 else 0.0
                ),
                num_cached_tokens=num_cached_tokens,
            )
        )
