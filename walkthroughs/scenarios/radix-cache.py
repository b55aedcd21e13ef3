"""One stream of requests, served twice: out of hash chains, then out of a radix tree.

Scheduler and KV-cache manager alone, with invented tokens: no model, no torch. A block holds 4
tokens, and there are 11 of them.

    a      SYSTEM + 5 tokens, answers with 5      alone
    b, c   SYSTEM + 9 tokens, the same prompt     arrive together, after a
    d      31 other tokens                        arrives last, and needs more than is free
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nanovllm.config import CacheConfig, SchedulerConfig
from nanovllm.distributed.kv_events import BlockRemoved
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.core.kv_cache_utils import get_request_block_hasher
from nanovllm.v1.core.sched.scheduler import Scheduler
from nanovllm.v1.request import Request

BLOCK_SIZE = 4
SYSTEM = list(range(100, 108))  # what chat prompts begin with: two blocks
PROMPTS = {
    "a": [*SYSTEM, 1, 2, 3, 4, 5],
    "b": [*SYSTEM, *range(11, 20)],
    "c": [*SYSTEM, *range(11, 20)],
    "d": list(range(30, 61)),
}
MAX_TOKENS = {"a": 5, "b": 2, "c": 2, "d": 1}


def make_scheduler(backend: Any) -> Scheduler:
    cache_config = CacheConfig(
        block_size=BLOCK_SIZE, num_gpu_blocks=12, prefix_cache_backend=backend
    )
    scheduler_config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=32)
    scheduler = Scheduler(scheduler_config, cache_config)
    scheduler.kv_cache_manager.enable_kv_cache_events(True)
    return scheduler


def make_request(req_id: str) -> Request:
    return Request(
        req_id,
        PROMPTS[req_id],
        SamplingParams(max_tokens=MAX_TOKENS[req_id], ignore_eos=True),
        arrival_time=0.0,
        block_hasher=get_request_block_hasher(BLOCK_SIZE),
    )


def step(scheduler: Scheduler) -> dict[str, int]:
    """One step without a model: every request that is up to date answers 70, 71, 72 ..."""
    output = scheduler.schedule()
    sampled = []
    for req_id in output.num_scheduled_tokens:
        request = scheduler.requests[req_id]
        sampled.append([] if request.is_prefill_chunk else [70 + request.num_output_tokens])
    result: Any = SimpleNamespace(
        req_id_to_index={req_id: i for i, req_id in enumerate(output.num_scheduled_tokens)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
    )
    scheduler.update_from_output(output, result)
    return {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}


def serve(backend: str) -> dict[str, Any]:
    """The whole stream: hits, in tokens; evicted block ids; what a and b would hit afterwards."""
    scheduler = make_scheduler(backend)
    manager = scheduler.kv_cache_manager
    hits: dict[str, int] = {}
    for group in ("a", "bc", "d"):
        for req_id in group:
            scheduler.add_request(make_request(req_id))
        while scheduler.has_unfinished_requests():
            hits |= step(scheduler)
    removed = [event for event in manager.take_events() if isinstance(event, BlockRemoved)]
    return {
        "hits": hits,
        "evicted": [block_id for event in removed for block_id in event.block_ids],
        "left": {r: manager.get_computed_blocks(make_request(r))[1] for r in "ab"},
    }


def main() -> None:
    hash_chains = serve("hash")
    radix_tree = serve("radix")
    compare(hash_chains, radix_tree)


def compare(hash_chains: dict[str, Any], radix_tree: dict[str, Any]) -> None:
    for what in hash_chains:
        print(f"{what:8} hash chains {hash_chains[what]}")
        print(f"{'':8} radix tree  {radix_tree[what]}")


if __name__ == "__main__":
    main()
