"""What a decode step costs on the scheduler's side: schedule() plus update_from_output().

    python scripts/bench_scheduler.py                  # ours
    python scripts/bench_scheduler.py --engine vllm --engine nanovllm   # where vllm is importable

No model runs: every request is handed a made-up token. Steps of the engines are interleaved, so
that both see the same machine; one JSON line an engine, times in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from nanovllm.config import CacheConfig, SchedulerConfig

BLOCK_SIZE = 16


def make_prompts(num_reqs: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1000) for _ in range(rng.randint(64, 512))] for _ in range(num_reqs)]


def make_nanovllm(prompts: list[list[int]], num_steps: int) -> Callable[[], float]:
    from nanovllm.sampling_params import SamplingParams
    from nanovllm.v1.core.kv_cache_utils import get_request_block_hasher
    from nanovllm.v1.core.sched.scheduler import Scheduler
    from nanovllm.v1.outputs import ModelRunnerOutput
    from nanovllm.v1.request import Request

    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=1 << 18, max_num_seqs=len(prompts),
                        max_model_len=4096),
        CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks=1 << 16),
        log_stats=True,
    )  # fmt: skip
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=num_steps + 10, ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK_SIZE)
        scheduler.add_request(Request(str(i), prompt, params, float(i), block_hasher=hasher))
    return make_step(scheduler, ModelRunnerOutput)


def make_vllm(prompts: list[list[int]], num_steps: int, model: str) -> Callable[[], float]:
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    model_config = ModelConfig(model=model, dtype="float16", seed=0, max_model_len=4096)
    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = 1 << 16
    vllm_config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=len(prompts), max_num_batched_tokens=1 << 18, max_model_len=4096,
            is_encoder_decoder=False, async_scheduling=False,
        ),
        model_config=model_config,
        cache_config=cache_config,
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
    )  # fmt: skip
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    scheduler = Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(
            num_blocks=1 << 16, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
        ),
        block_size=BLOCK_SIZE,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(vllm_config),
    )
    init_none_hash(sha256)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=num_steps + 10, ignore_eos=True)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        scheduler.add_request(
            Request(str(i), prompt, params, None, arrival_time=float(i), block_hasher=hasher)
        )
    return make_step(scheduler, ModelRunnerOutput)


def make_step(scheduler: Any, output_cls: Any) -> Callable[[], float]:
    """One step of either scheduler; returns its milliseconds, the made-up model's aside."""
    rng = random.Random(1)

    def step() -> float:
        start = time.perf_counter()
        scheduler_output = scheduler.schedule()
        seconds = time.perf_counter() - start
        req_ids = list(scheduler_output.num_scheduled_tokens)
        model_output = output_cls(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=[[rng.randrange(1000)] for _ in req_ids],
        )
        start = time.perf_counter()
        scheduler.update_from_output(scheduler_output, model_output)
        return 1000 * (seconds + time.perf_counter() - start)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", action="append", choices=("nanovllm", "vllm"), default=None)
    parser.add_argument("--num-reqs", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--model", help="a checkpoint folder, for vLLM's ModelConfig")
    args = parser.parse_args()
    prompts = make_prompts(args.num_reqs)
    steps: dict[str, Callable[[], float]] = {}
    for engine in args.engine or ["nanovllm"]:
        if engine == "vllm":
            steps[engine] = make_vllm(prompts, args.num_steps, args.model)
        else:
            steps[engine] = make_nanovllm(prompts, args.num_steps)
    times: dict[str, list[float]] = {engine: [] for engine in steps}
    for i in range(args.num_steps):
        for engine, step in steps.items():
            milliseconds = step()
            if i > 0:  # the first step takes all prompts in
                times[engine].append(milliseconds)
    medians = {engine: statistics.median(values) for engine, values in times.items()}
    for engine, values in times.items():
        line = {"engine": engine, "num_reqs": args.num_reqs, "steps": len(values),
                "median_ms": round(medians[engine], 3),
                "mean_ms": round(statistics.mean(values), 3)}  # fmt: skip
        print(json.dumps(line))
    if len(medians) == 2:
        print(json.dumps({"nanovllm / vllm": round(medians["nanovllm"] / medians["vllm"], 2)}))


if __name__ == "__main__":
    main()
