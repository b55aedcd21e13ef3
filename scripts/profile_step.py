"""Which kernels a step runs, and where its time goes.

    python scripts/profile_step.py --model CHECKPOINT --batch-size 256 --context-len 1096

Runs decode steps of a full batch (or, with --prompt-len, one prompt) under torch.profiler and lists
the kernels by name: launches a step, microseconds a step and their share. Beside it the time of the
host: how long `step` works when it does not wait for the device.

--chrome FILE writes the trace for chrome://tracing or ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--context-len", type=int, default=1024)
    parser.add_argument(
        "--prompt-len", type=int, help="profile the step of one such prompt instead"
    )
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=25, help="kernels to list")
    parser.add_argument("--engine-args", default="{}", help="JSON, further arguments of LLM(...)")
    parser.add_argument("--chrome")
    args = parser.parse_args()

    from nanovllm import LLM, SamplingParams

    llm = LLM(
        args.model, skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=False,
        max_model_len=max(args.context_len + args.steps + 200, (args.prompt_len or 0) + 8),
        **json.loads(args.engine_args),
    )  # fmt: skip
    engine, rng = llm.llm_engine, random.Random(0)
    num_requests, prompt_len = args.batch_size, args.context_len
    if args.prompt_len:
        num_requests, prompt_len = 1, args.prompt_len
    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, ignore_eos=True, detokenize=False,
        max_tokens=1 if args.prompt_len else args.steps * 2 + 100,
    )  # fmt: skip

    def add_requests(tag: str) -> None:
        for i in range(num_requests):
            prompt = [rng.randrange(10_000) for _ in range(prompt_len)]
            engine.add_request(f"{tag}-{i}", prompt, params)

    def run_prompt(tag: str) -> None:
        add_requests(tag)
        while engine.has_unfinished_requests():
            engine.step()

    if args.prompt_len:
        for i in range(3):
            run_prompt(f"warm-up {i}")
    else:
        add_requests("request")
        for _ in range(60):  # prompts, then decode steps
            engine.step()
    torch.cuda.synchronize()

    # The host's own time: a step minus its wait for the device.
    core = engine.engine_core.engine_core  # type: ignore[attr-defined]
    host_ms, wall_ms = [], []
    if not args.prompt_len:
        waited = 0.0
        output_cls = type(core.batch_queue[0][1]) if core.batch_queue else None
        if output_cls is not None:
            get_output = output_cls.get_output

            def timed_get_output(self):  # type: ignore[no-untyped-def]
                nonlocal waited
                start = time.perf_counter()
                self._copied.synchronize()
                waited += time.perf_counter() - start
                return get_output(self)

            output_cls.get_output = timed_get_output
            for _ in range(args.steps):
                waited = 0.0
                start = time.perf_counter()
                engine.step()
                wall_ms.append((time.perf_counter() - start) * 1e3)
                host_ms.append(wall_ms[-1] - waited * 1e3)
            output_cls.get_output = get_output

    steps = 1 if args.prompt_len else args.steps
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        if args.prompt_len:
            run_prompt("profiled")
        else:
            for _ in range(steps):
                engine.step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name].append(event.device_time_total)
    total = sum(sum(times) for times in kernels.values())
    print(f"{'us/step':>9} {'share':>6} {'launches':>8} {'us each':>8}  kernel")
    ranked = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    for name, times in ranked[: args.rows]:
        print(
            f"{sum(times) / steps:9.1f} {sum(times) / total:6.1%} {len(times) / steps:8.1f} "
            f"{statistics.median(times):8.1f}  {name[:100]}"
        )
    print(f"{total / steps:9.1f} us of kernels a step, {len(kernels)} different ones")
    if wall_ms:
        print(
            f"a step takes {statistics.median(wall_ms):.3f} ms, of which the host works "
            f"{statistics.median(host_ms):.3f} ms (medians of {args.steps})"
        )
    if args.chrome:
        prof.export_chrome_trace(args.chrome)


if __name__ == "__main__":
    main()
