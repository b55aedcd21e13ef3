"""Numbers that the scheduler and the output processor collect.

Upstream: vllm/v1/metrics/stats.py (0.23.0)
Left out: LoRA, KV-connector, multimodal-cache and eviction statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
