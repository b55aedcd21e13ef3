"""The embedded model in a KV cache of 7 blocks, without prefix caching.

Two requests share the cache; when both have ended, a third gets their blocks, in another order.
"""

from __future__ import annotations

from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.sampling_params import SamplingParams
from nanovllm.v1.engine import EngineCoreRequest
from nanovllm.v1.engine.core import EngineCore

BLOCK_SIZE = 4
KV_CACHE_MEMORY_BYTES = 120_000
REQUESTS = {  # id: prompt, max_tokens
    "x": ([11, 12, 13, 14, 15, 16], 4),
    "y": ([21, 22, 23], 6),
    "z": ([31, 32, 33, 34, 35, 36, 37, 38, 39, 40], 2),
}
WAVES = [["x", "y"], ["z"]]  # who comes together, when everybody before has ended


def make_request(req_id: str) -> EngineCoreRequest:
    prompt, max_tokens = REQUESTS[req_id]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(req_id, prompt, params, arrival_time=0.0)


ENGINE_CONFIG = EngineArgs(
    device="cpu",
    enforce_eager=True,
    block_size=BLOCK_SIZE,
    kv_cache_memory_bytes=KV_CACHE_MEMORY_BYTES,
    max_model_len=24,
    max_num_seqs=4,
    enable_prefix_caching=False,
).create_engine_config()


def main() -> None:
    engine_core = EngineCore(ENGINE_CONFIG)
    print(f"{engine_core.kv_cache_config.num_blocks} blocks, block 0 included")
    manager = engine_core.scheduler.kv_cache_manager
    for wave in WAVES:
        for req_id in wave:
            engine_core.add_request(make_request(req_id))
        while engine_core.has_unfinished_requests():
            outputs = engine_core.step().outputs
            tables = {req_id: manager.get_block_ids(req_id) for req_id in wave}
            free = [b.block_id for b in manager.block_pool.free_block_queue.get_all_free_blocks()]
            tokens = {output.request_id: output.new_token_ids for output in outputs}
            print(f"tokens {tokens}  tables {tables}  free {free}")
    engine_core.shutdown()


if __name__ == "__main__":
    main()
