"""The fused ops of a decoder layer on the GPU: right first, then how fast.

    python scripts/bench_fused_ops.py --out fused_ops.jsonl
    python scripts/bench_fused_ops.py --sections stack

Shapes are those of Qwen3-0.6B, in bfloat16. Every time is that of kernels in a CUDA graph which
goes through 28 layers' weights of their own, 880 MB, so that none of them is found in a cache. The
floor is the bytes that have to be moved at the read bandwidth, which is measured first.

    check   every op against float64 or the separate layers
    stack   28 layers without attention: torch and cuBLAS; fused ops and cuBLAS; skinny linear
            layers, without and with programmatic dependent launch (PDL)
    sweep   how to cut up each linear layer for 1, 4 and 8 rows
    norms   RMSNorm and the pass from qkv to attention's inputs, for 1 to 8,192 tokens
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from bench_common import Ceilings

from nanovllm.model_executor.layers.activation import SiluAndMul
from nanovllm.model_executor.layers.layernorm import RMSNorm, fused_add_rms_norm, rms_norm
from nanovllm.model_executor.layers.qk_norm_rope_cache import (
    qk_norm_rope_and_cache_cuda,
    qk_norm_rope_and_cache_native,
)
from nanovllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_executor.layers.skinny_linear import (
    SkinnyConfig,
    get_skinny_config,
    skinny_linear_cuda,
    skinny_linear_native,
)
from nanovllm.triton_utils import num_compute_units

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, VOCAB, LAYERS = 1024, 3072, 16, 8, 128, 151936, 28
Q_SIZE = HEADS * HEAD_SIZE
SHAPES = {  # rows and columns of the weight
    "qkv": (Q_SIZE + 2 * KV_HEADS * HEAD_SIZE, HIDDEN),
    "o": (HIDDEN, Q_SIZE),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "lm_head": (VOCAB, HIDDEN),
}
BLOCK_SIZE = 16


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def make_norm(size: int) -> RMSNorm:
    norm = RMSNorm(size).to("cuda", torch.bfloat16)
    norm.weight.data = 1 + rand(size) / 8
    return norm


@dataclass
class Layer:
    """A decoder layer's weights, and its KV cache."""

    weights: dict[str, torch.Tensor]
    norms: dict[str, RMSNorm]
    kv_cache: torch.Tensor

    @classmethod
    def make(cls, num_blocks: int = 8) -> Layer:
        return cls(
            {name: rand(n, k) / k**0.5 for name, (n, k) in SHAPES.items() if name != "lm_head"},
            {name: make_norm(HIDDEN) for name in ("input", "post_attention")}
            | {name: make_norm(HEAD_SIZE) for name in ("q", "k")},
            torch.zeros(
                num_blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16
            ),
        )

    def fused_with(self, name: str, x: torch.Tensor) -> dict[str, Any]:
        """What the layer's linear layer `name` is fused with, as keyword arguments."""
        if name == "qkv":
            return {"norm": self.norms["input"]}
        if name == "gate_up":
            return {"norm": self.norms["post_attention"], "silu_and_mul": True}
        return {"residual": x.new_zeros(x.shape[0], HIDDEN)} if name != "lm_head" else {}


class Step:
    """What all layers of a step share."""

    def __init__(self, num_tokens: int, rotary_emb: RotaryEmbedding) -> None:
        self.positions = torch.arange(num_tokens, device="cuda")
        self.slot_mapping = torch.arange(num_tokens, device="cuda")
        self.heads: dict[str, Any] = {
            "rotary_emb": rotary_emb,
            "num_heads": HEADS,
            "num_kv_heads": KV_HEADS,
        }

    def qk_args(self, layer: Layer) -> dict[str, Any]:
        return self.heads | {"q_norm": layer.norms["q"], "k_norm": layer.norms["k"]}


# The stack. Attention is left out: q, after norm and rotation, stands for its output.


def run_torch(layers: list[Layer], step: Step, h: torch.Tensor) -> torch.Tensor:
    """One torch operation after the other, as on the CPU."""
    x, residual, rotary_emb = h, torch.zeros_like(h), step.heads["rotary_emb"]
    blocks, offsets = step.slot_mapping // BLOCK_SIZE, step.slot_mapping % BLOCK_SIZE
    kv_size = KV_HEADS * HEAD_SIZE
    for layer in layers:
        x, residual = layer.norms["input"].forward_native(x, residual)
        qkv = F.linear(x, layer.weights["qkv"])
        q, k, v = qkv.split([Q_SIZE, kv_size, kv_size], dim=-1)
        q = layer.norms["q"].forward_native(q.unflatten(-1, (-1, HEAD_SIZE))).flatten(1)
        k = layer.norms["k"].forward_native(k.unflatten(-1, (-1, HEAD_SIZE))).flatten(1)
        q, k = rotary_emb(step.positions, q, k)
        layer.kv_cache[blocks, 0, offsets] = k.unflatten(-1, (KV_HEADS, HEAD_SIZE))
        layer.kv_cache[blocks, 1, offsets] = v.unflatten(-1, (KV_HEADS, HEAD_SIZE))
        x = F.linear(q, layer.weights["o"])
        x, residual = layer.norms["post_attention"].forward_native(x, residual)
        gate, up = F.linear(x, layer.weights["gate_up"]).chunk(2, dim=-1)
        x = F.linear(F.silu(gate) * up, layer.weights["down"])
    return x + residual


def run_fused(layers: list[Layer], step: Step, h: torch.Tensor) -> torch.Tensor:
    """Fused ops between cuBLAS's matrix multiplications."""
    x, residual, act_fn = h, torch.zeros_like(h), SiluAndMul()
    for layer in layers:
        x, residual = layer.norms["input"].forward_cuda(x, residual)
        qkv = F.linear(x, layer.weights["qkv"])
        qk_norm_rope_and_cache_cuda(
            qkv, step.positions, layer.kv_cache, step.slot_mapping, **step.qk_args(layer)
        )
        x = F.linear(qkv[:, :Q_SIZE], layer.weights["o"])
        x, residual = layer.norms["post_attention"].forward_cuda(x, residual)
        x = F.linear(
            act_fn.forward_cuda(F.linear(x, layer.weights["gate_up"])), layer.weights["down"]
        )
    return x + residual


def run_skinny(layers: list[Layer], step: Step, h: torch.Tensor, use_pdl: bool) -> torch.Tensor:
    """Four linear layers with all that is between them, and the pass before attention."""
    for layer in layers:
        qkv = skinny_linear_cuda(
            h, layer.weights["qkv"], norm=layer.norms["input"], use_pdl=use_pdl
        )
        qk_norm_rope_and_cache_cuda(
            qkv,
            step.positions,
            layer.kv_cache,
            step.slot_mapping,
            **step.qk_args(layer),
            use_pdl=use_pdl,
        )
        h = skinny_linear_cuda(qkv[:, :Q_SIZE], layer.weights["o"], residual=h, use_pdl=use_pdl)
        act = skinny_linear_cuda(
            h,
            layer.weights["gate_up"],
            norm=layer.norms["post_attention"],
            silu_and_mul=True,
            use_pdl=use_pdl,
        )
        h = skinny_linear_cuda(act, layer.weights["down"], residual=h, use_pdl=use_pdl)
    return h


STACKS: dict[str, Callable[[list[Layer], Step, torch.Tensor], torch.Tensor]] = {
    "torch": run_torch,
    "fused": run_fused,
    "skinny": lambda layers, step, h: run_skinny(layers, step, h, use_pdl=False),
    "skinny_pdl": lambda layers, step, h: run_skinny(layers, step, h, use_pdl=True),
}


def graph_ms(run: Callable[[], object], repeat: int = 5) -> float:
    """A replay of the CUDA graph of `run`: the median over `repeat` of the mean of ten."""
    run()  # compiles, allocates
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 10)
    return statistics.median(times)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


class Bench:
    """The sections; each prints a table and writes a JSON line a measurement."""

    def __init__(self, out: TextIO | None) -> None:
        self.out = out
        self.bandwidth = Ceilings.measure().read_bytes_per_s
        self.rotary_emb = RotaryEmbedding(HEAD_SIZE, 16384, 1e6).to("cuda")
        self.layers = [Layer.make() for _ in range(LAYERS)]
        self.lm_head = rand(VOCAB, HIDDEN) / HIDDEN**0.5
        self.use_pdl = torch.cuda.get_device_capability()[0] >= 9
        print(f"{torch.cuda.get_device_name()}: reads {self.bandwidth / 1e12:.2f} TB/s")

    def emit(self, **fields: Any) -> None:
        if self.out is not None:
            print(json.dumps(fields), file=self.out, flush=True)

    def floor_ms(self, num_bytes: float) -> float:
        return num_bytes / self.bandwidth * 1e3

    def weights(self, name: str) -> list[torch.Tensor]:
        """All layers', or four times the head, which is larger than the caches."""
        return [self.lm_head] * 4 if name == "lm_head" else [x.weights[name] for x in self.layers]

    def check(self) -> None:
        """Largest relative error of each op, and equal results with and without PDL."""
        layer = self.layers[0]
        worst: dict[str, float] = {}
        for num_rows in (1, 2, 3, 8):
            for name, (_, k) in SHAPES.items():
                x, weight = rand(num_rows, k), self.weights(name)[0]
                kwargs = layer.fused_with(name, x)
                out = skinny_linear_cuda(x, weight, **kwargs)
                error = relative_error(out, skinny_linear_native(x, weight, **kwargs))
                worst[name] = max(worst.get(name, 0.0), error)
        for num_tokens in (1, 77):
            x, residual, norm = (
                rand(num_tokens, HIDDEN),
                rand(num_tokens, HIDDEN),
                make_norm(HIDDEN),
            )
            out, _ = fused_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
            worst["norm"] = relative_error(out, norm.forward_native(x, residual)[0])
            step, qkv = Step(num_tokens, self.rotary_emb), rand(num_tokens, SHAPES["qkv"][0])
            expected, cache = qkv.clone(), layer.kv_cache.clone()
            args = step.positions, layer.kv_cache, step.slot_mapping
            qk_norm_rope_and_cache_cuda(qkv, *args, **step.qk_args(layer))
            args = step.positions, cache, step.slot_mapping
            qk_norm_rope_and_cache_native(expected, *args, **step.qk_args(layer))
            worst["qk"] = relative_error(qkv, expected)
            worst["cache"] = relative_error(layer.kv_cache, cache)
        step, h = Step(4, self.rotary_emb), rand(4, HIDDEN)
        expected = run_torch(self.layers[:1], step, h)
        for name in ("fused", "skinny"):
            worst[f"layer {name}"] = relative_error(
                STACKS[name](self.layers[:1], step, h), expected
            )
        print("relative errors:", "  ".join(f"{k} {v:.1e}" for k, v in worst.items()))
        assert max(worst.values()) < 1e-2
        self.emit(section="check", errors=worst)
        if self.use_pdl:
            for num_rows in (1, 4):
                step, h = Step(num_rows, self.rotary_emb), rand(num_rows, HIDDEN)
                expected = run_skinny(self.layers, step, h, use_pdl=False)
                for _ in range(20):
                    assert torch.equal(run_skinny(self.layers, step, h, use_pdl=True), expected)
            print("the same, bit for bit, with and without PDL")

    def stack(self) -> None:
        """Milliseconds for 28 layers."""
        num_bytes = sum(w.nbytes for layer in self.layers for w in layer.weights.values())
        floor = self.floor_ms(num_bytes)
        stacks = [name for name in STACKS if name != "skinny_pdl" or self.use_pdl]
        print(f"\n{LAYERS} layers without attention, ms (floor {floor:.3f}: weights once)")
        print("rows  " + "".join(f"{name:>12}" for name in stacks))
        for num_rows in (1, 2, 4, 8, 16, 32):
            step, h = Step(num_rows, self.rotary_emb), rand(num_rows, HIDDEN)
            line = ""
            for name in stacks:
                ms = graph_ms(lambda run=STACKS[name], step=step, h=h: run(self.layers, step, h))
                line += f"{ms:12.3f}"
                self.emit(section="stack", name=name, rows=num_rows, ms=ms, floor_ms=floor)
            print(f"{num_rows:4}  {line}")

    def skinny_ms(self, name: str, x: torch.Tensor, config: SkinnyConfig | None) -> float:
        """One linear layer, on average over those of all layers."""
        weights, kwargs = self.weights(name), self.layers[0].fused_with(name, x)

        def run() -> None:
            for weight in weights:
                skinny_linear_cuda(x, weight, **kwargs, config=config)

        return graph_ms(run) / len(weights)

    def cublas_ms(self, name: str, x: torch.Tensor) -> float:
        weights = self.weights(name)
        return graph_ms(lambda: [F.linear(x, weight) for weight in weights]) / len(weights)

    def sweep(self) -> None:
        """Microseconds of each linear layer: cuBLAS alone, the configuration that
        `get_skinny_config` chooses, and the three best of all, with what they fuse."""
        self.compile(sweep_configs(k) for _, k in SHAPES.values())
        num_sms = num_compute_units(torch.device("cuda"))
        print("\nlinear layers, us: (BLOCK_N, BLOCK_K, warps, dot)")
        for name, (n, k) in SHAPES.items():
            floor = self.floor_ms(n * k * 2)
            for num_rows in (1, 4, 8):
                x = rand(num_rows, k)
                default = get_skinny_config(num_rows, n, k, 2, num_sms)
                times = {}
                for config in {default, *sweep_configs(k)}:
                    if not config.use_dot and num_rows > 1 and config != default:
                        continue
                    try:
                        times[config] = self.skinny_ms(name, x, config)
                    except Exception as e:  # too large a tile: Triton's own exceptions
                        self.emit(section="sweep", name=name, config=config, error=str(e)[:200])
                        continue
                    fields = {"name": name, "rows": num_rows, "config": config}
                    self.emit(
                        section="sweep", **fields, us=times[config] * 1e3, floor_us=floor * 1e3
                    )
                cublas = self.cublas_ms(name, x)
                self.emit(section="sweep", name=name, rows=num_rows, cublas_us=cublas * 1e3)
                best = sorted(times, key=times.__getitem__)[:3]
                print(
                    f"{name:8} {num_rows} rows: floor {floor * 1e3:6.2f}"
                    f"  cuBLAS {cublas * 1e3:6.2f}"
                    f"  default {times[default] * 1e3:6.2f} {show(default)}  best "
                    + ", ".join(f"{times[c] * 1e3:.2f} {show(c)}" for c in best)
                )

    def compile(self, configs: Iterable[list[SkinnyConfig]]) -> None:
        """All variants, in threads: Triton and ptxas let go of the interpreter's lock."""
        start, num_variants = time.perf_counter(), 0

        def launch(name: str, config: SkinnyConfig, num_rows: int) -> None:
            x = rand(num_rows, SHAPES[name][1])
            kwargs = self.layers[0].fused_with(name, x)
            try:
                skinny_linear_cuda(x, self.weights(name)[0], **kwargs, config=config)
            except Exception as e:
                print(f"{name} {show(config)}: {type(e).__name__}")

        with ThreadPoolExecutor(16) as pool:
            for name, for_shape in zip(SHAPES, configs, strict=True):
                for config in for_shape:
                    num_variants += 1
                    pool.submit(launch, name, config, 4 if config.use_dot else 1)
        torch.cuda.synchronize()
        print(f"\n{num_variants} variants compiled in {time.perf_counter() - start:.1f} s")

    def norms(self) -> None:
        """Microseconds and GB/s, reading and writing."""
        print("\nnorms, us and GB/s")
        norm, layer = make_norm(HIDDEN), self.layers[0]
        eps, row = norm.variance_epsilon, HIDDEN * 2
        qkv_row = SHAPES["qkv"][0] * 2
        # Read once; q and k written in place, k and v to the cache.
        qk_bytes = qkv_row + (Q_SIZE + 3 * KV_HEADS * HEAD_SIZE) * 2
        cache = Layer.make(num_blocks=8192 // BLOCK_SIZE).kv_cache
        for num_tokens in (1, 256, 8192):
            copies = 4 if num_tokens == 8192 else LAYERS  # enough not to be found in the L2 cache
            xs = [rand(num_tokens, HIDDEN) for _ in range(2 * copies)]
            qkvs = [rand(num_tokens, qkv_row // 2) for _ in range(copies)]
            step = Step(num_tokens, self.rotary_emb)

            def run_qk(qkvs: list[torch.Tensor] = qkvs, step: Step = step) -> None:
                for qkv in qkvs:
                    qk_norm_rope_and_cache_cuda(
                        qkv, step.positions, cache, step.slot_mapping, **step.qk_args(layer)
                    )

            pairs = list(zip(xs[::2], xs[1::2], strict=True))
            ops: dict[str, tuple[int, Callable[[], object]]] = {
                "rms_norm": (
                    2 * row,
                    lambda pairs=pairs: [rms_norm(x, norm.weight, eps) for x, _ in pairs],
                ),
                "fused_add_rms_norm": (
                    4 * row,
                    lambda pairs=pairs: [
                        fused_add_rms_norm(x, y, norm.weight, eps) for x, y in pairs
                    ],
                ),
                "qk_norm_rope_and_cache": (qk_bytes, run_qk),
            }
            for name, (bytes_a_token, run) in ops.items():
                seconds = graph_ms(run) / copies / 1e3
                gb_per_s = num_tokens * bytes_a_token / seconds / 1e9
                print(f"{name:24} {num_tokens:5} tokens {seconds * 1e6:8.2f} {gb_per_s:7.0f}")
                fields = {"name": name, "tokens": num_tokens, "us": seconds * 1e6}
                self.emit(section="norms", **fields, gb_per_s=gb_per_s)


def show(config: SkinnyConfig) -> str:
    return f"({config.block_n}, {config.block_k}, {config.num_warps}, {int(config.use_dot)})"


def sweep_configs(k: int) -> list[SkinnyConfig]:
    """Both kernels, tiles up to 96 KB of the weight and, where they stay in registers, up to half
    of them."""
    gemv = [
        SkinnyConfig(block_n, block_k, num_warps, use_dot=False)
        for block_n in (4, 8, 16, 32)
        for block_k, num_warps in ((256, 4), (512, 2), (1024, 4), (2048, 8))
        if block_k <= k and block_n * k * 2 <= num_warps * 16384
    ]
    dot = [
        SkinnyConfig(block_n, block_k, num_warps, use_dot=True)
        for block_n in (16, 32)
        for block_k, num_warps in ((512, 4), (1024, 4), (1024, 8))
    ]
    return [config for config in gemv + dot if config.block_n * k * 2 <= 98304]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sections = ["check", "stack", "sweep", "norms"]
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--out", type=argparse.FileType("a"), help="JSON lines are appended")
    args = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(0)
    with torch.inference_mode():
        bench = Bench(args.out)
        for section in args.sections:
            getattr(bench, section)()
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
