"""What the GPU benchmarks share: the engines behind one interface, JSON lines, and the floor.

Each engine runs in a process of its own, so to compare engines a script is run once for each, on
the same machine in a row, with the same checkpoint. vLLM has to be importable in its process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nanovllm.triton_utils import tl, triton

os.environ.setdefault("HF_HUB_OFFLINE", "1")
Prompts = Sequence[list[int]]


class Engine(Protocol):
    """Token ids in, token ids out."""

    def generate(
        self, prompts: Prompts, max_tokens: Sequence[int], temperature: float
    ) -> list[list[int]]: ...


class OfflineEngine:
    """vLLM's LLM class and ours, which have the same interface."""

    def __init__(self, name: str, args: argparse.Namespace, **engine_args: Any) -> None:
        if name == "vllm":
            from vllm import LLM, SamplingParams
        else:
            from nanovllm import LLM, SamplingParams
        self.sampling_params = SamplingParams
        engine_args |= json.loads(args.engine_args)
        self.llm = LLM(
            model=args.model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            gpu_memory_utilization=0.9,
            **engine_args,
        )

    def generate(
        self, prompts: Prompts, max_tokens: Sequence[int], temperature: float
    ) -> list[list[int]]:
        params = [
            self.sampling_params(
                temperature=temperature, ignore_eos=True, max_tokens=n, detokenize=False
            )
            for n in max_tokens
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


class HFEngine:
    """transformers' generate on one static batch: prompts of one length, outputs of one length."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
        self.model.to("cuda").eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def generate(
        self, prompts: Prompts, max_tokens: Sequence[int], temperature: float
    ) -> list[list[int]]:
        if len({len(prompt) for prompt in prompts}) > 1 or len(set(max_tokens)) > 1:
            raise ValueError("a static batch needs prompts of one length and outputs of one length")
        sampling = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        ids = self.torch.tensor(list(prompts), device="cuda")
        with self.torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=max_tokens[0],
                min_new_tokens=max_tokens[0],
                **sampling,
            )
        return output[:, ids.shape[1] :].tolist()


def make_engine(args: argparse.Namespace, **engine_args: Any) -> Engine:
    """The engine that --engine names."""
    if args.engine == "hf":
        return HFEngine(args)
    return OfflineEngine(args.engine, args, **engine_args)


def add_common_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("nanovllm", "vllm", "hf"), default="nanovllm")
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each measurement")
    parser.add_argument("--out", help="file that the JSON lines are appended to")
    parser.add_argument("--engine-args", default="{}", help="JSON, further arguments of LLM(...)")


def random_tokens(rng: random.Random, n: int) -> list[int]:
    """Any ids will do: the time of a step does not depend on them."""
    return [rng.randrange(10_000) for _ in range(n)]


def timed(
    engine: Engine, prompts: Prompts, max_tokens: Sequence[int], temperature: float = 0.6
) -> float:
    """Seconds for the whole call; every request must give all its tokens."""
    start = time.perf_counter()
    outputs = engine.generate(prompts, max_tokens, temperature)
    seconds = time.perf_counter() - start
    got = [len(output) for output in outputs]
    assert got == list(max_tokens), f"asked for {list(max_tokens)[:4]}..., got {got[:4]}..."
    return seconds


def emit(
    args: argparse.Namespace,
    workload: str,
    unit: str,
    values: Sequence[float],
    floor: float | None = None,
) -> None:
    """Print one result as a JSON line, and append it to --out.

    Args:
        values: the repetitions.
        floor: the least time there can be, in the same unit; its share of the median is given too.
    """
    median = statistics.median(values)
    line: dict[str, Any] = {
        "workload": workload,
        "engine": args.engine,
        "unit": unit,
        "median": round(median, 4),
        "all": [round(value, 4) for value in values],
    }
    if floor is not None:
        line |= {"floor": round(floor, 4), "share_of_floor": round(floor / median, 3)}
    text = json.dumps(line)
    print(text, flush=True)
    if args.out:
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(text + "\n")


@triton.jit
def read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """Adds BLOCK * TILES elements up a program: nothing but reads."""
    first = tl.program_id(0).to(tl.int64) * (BLOCK * TILES)
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(TILES):
        total += tl.load(x_ptr + first + tile * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


@dataclass
class Ceilings:
    """What this GPU reaches, measured."""

    read_bytes_per_s: float
    flops_per_s: float  # bfloat16 matrix multiplication

    @classmethod
    def measure(cls) -> Ceilings:
        """In a second or two, with 5 GB of free memory. Last, so that no engine is disturbed."""
        import torch

        x = torch.randn(1 << 30, device="cuda")
        sums = torch.empty(x.numel() // (4096 * 16), device="cuda")
        seconds = _median_seconds(
            lambda: read_kernel[sums.shape](x, sums, BLOCK=4096, TILES=16, num_warps=8)
        )
        read = x.numel() * x.element_size() / seconds
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return cls(read, 2 * 8192**3 / _median_seconds(lambda: a @ b))


def _median_seconds(run: Callable[[], object], repeat: int = 20) -> float:
    import torch

    times = []
    for i in range(repeat + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


class Floors:
    """Times that no engine can beat on this GPU: bytes that have to be read, at the measured read
    bandwidth; operations that have to be done, at the measured matrix rate."""

    def __init__(self, model: str, ceilings: Ceilings) -> None:
        from transformers import AutoConfig

        from nanovllm.v1.metrics.perf import ModelMetrics, ModelShape, kv_bytes_per_token

        shape = ModelShape.from_hf_config(AutoConfig.from_pretrained(model))
        self.metrics = ModelMetrics(shape, "bfloat16")
        weights = self.metrics.weights
        # Of a table that is not also the head, only the tokens' rows are read.
        tables = weights["positions"]
        if not shape.tie_word_embeddings:
            tables += weights["embedding"]
        self.weight_bytes = sum(weights.values()) - tables
        self.kv_bytes_per_token = kv_bytes_per_token(shape, "bfloat16")
        self.ceilings = ceilings

    def decode_ms(self, num_context_tokens: float) -> float:
        """One step: every weight that is multiplied, and the keys and values of all requests,
        once."""
        num_bytes = self.weight_bytes + num_context_tokens * self.kv_bytes_per_token
        return num_bytes / self.ceilings.read_bytes_per_s * 1e3

    def prefill_ms(self, prompt_len: int) -> float:
        """One prompt's multiplications, causal attention included."""
        from nanovllm.v1.metrics.perf import ExecutionContext

        step = ExecutionContext.from_lens([prompt_len], [prompt_len])
        return self.metrics.get_num_flops(step) / self.ceilings.flops_per_s * 1e3
