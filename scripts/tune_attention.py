"""Sweep the attention kernels on a GPU and compare the heuristics with the best that was found.

    python scripts/tune_attention.py --out attention.jsonl

Every configuration is first checked: a small ragged batch against float64. Then it is timed on
workloads of the shape of Qwen3-0.6B's layers, in a CUDA graph of 28 layers that each have a cache
of their own, so that the L2 cache holds nothing from the layer before. For each workload the best
configurations are printed, and what the engine's heuristics choose.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TextIO

import numpy as np
import torch

from nanovllm.triton_utils import num_compute_units, tl, triton
from nanovllm.v1.attention.backends.triton_attn import dense_attention, get_query_blocks
from nanovllm.v1.attention.ops import triton_unified_attention as ops
from nanovllm.v1.attention.ops.triton_reshape_and_cache_flash import reshape_and_cache_flash
from nanovllm.v1.attention.ops.triton_unified_attention import DecodeConfig, PrefillConfig, Segments

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 28, 16, 8, 128
GROUP = NUM_HEADS // NUM_KV_HEADS
SCALE = HEAD_SIZE**-0.5
MAX_ERROR = 1e-2  # of norm(difference) / norm(expected), bfloat16
Config = DecodeConfig | PrefillConfig


@dataclass
class Workload:
    """A batch of one kind: every query has `query_len` tokens."""

    name: str
    query_len: int
    contexts: list[int]  # tokens before the query
    shared: int = 0  # of them, in the same blocks for all
    num_layers: int = NUM_LAYERS

    @property
    def seq_lens(self) -> np.ndarray:
        return np.array(self.contexts) + self.query_len

    @property
    def kv_bytes(self) -> int:
        """Of keys and values that one layer reads, a shared token counted for every request."""
        return int(self.seq_lens.sum()) * 2 * NUM_KV_HEADS * HEAD_SIZE * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Of one layer, counting only what the causal mask leaves."""
        query = np.full(len(self.contexts), self.query_len)
        visible = query * np.array(self.contexts) + query * (query + 1) // 2
        return int(visible.sum()) * 4 * NUM_HEADS * HEAD_SIZE


class Batch:
    """A workload's tensors over the first blocks of the given caches, dealt out at random."""

    def __init__(self, workload: Workload, caches: list[torch.Tensor], block_size: int) -> None:
        rng = np.random.default_rng(0)
        self.workload, self.caches = workload, caches[: workload.num_layers]
        num_reqs, seq_lens = len(workload.contexts), workload.seq_lens
        num_blocks = -(-seq_lens // block_size)
        num_shared = workload.shared // block_size
        total = num_shared + int((num_blocks - num_shared).sum())
        assert total <= len(caches[0]), f"{workload.name} needs {total} blocks"
        order = rng.permutation(total)
        table = np.zeros((num_reqs, num_blocks.max()), dtype=np.int32)
        table[:, :num_shared] = order[:num_shared]
        start = num_shared
        for row, n in enumerate(num_blocks):
            table[row, num_shared:n] = order[start : start + n - num_shared]
            start += n - num_shared
        query_lens = np.full(num_reqs, workload.query_len)
        self.block_table = torch.from_numpy(table).to(DEVICE)
        self.seq_lens = torch.from_numpy(seq_lens.astype(np.int32)).to(DEVICE)
        self.req_order = torch.from_numpy(np.argsort(-seq_lens).astype(np.int32)).to(DEVICE)
        self.query_start_loc = torch.arange(
            0, num_reqs * workload.query_len + 1, workload.query_len, dtype=torch.int32
        ).to(DEVICE)
        self.segments = Segments.allocate(
            num_reqs, num_reqs * ops.MAX_SEGMENTS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, DEVICE
        )
        num_tokens = int(query_lens.sum())
        num_heads = NUM_HEADS + 2 * NUM_KV_HEADS
        self.qkv = torch.randn(num_tokens, num_heads, HEAD_SIZE).to(DEVICE, DTYPE)
        self.output = torch.full_like(self.qkv[:, :NUM_HEADS], float("nan")).contiguous()
        self.query_blocks = {
            block_m: torch.from_numpy(
                get_query_blocks(
                    0 * query_lens, query_lens, np.array(workload.contexts), block_m // GROUP
                )
            ).to(DEVICE)
            for block_m in (32, 64, 128)
        }

    def layer(self, config: Config, kv_cache: torch.Tensor) -> None:
        args = (
            self.output,
            self.qkv[:, :NUM_HEADS],
            kv_cache,
            self.query_start_loc,
            self.seq_lens,
            self.block_table,
        )
        if isinstance(config, DecodeConfig):
            ops.decode_attention(*args, self.req_order, SCALE, config, self.segments)
        else:
            ops.prefill_attention(*args, self.query_blocks[config.block_m], SCALE, config)

    def expected(self) -> torch.Tensor:
        """The first layer in float64, one request after the other."""
        cache, outputs = self.caches[0], []
        for row, (seq_len, context) in enumerate(
            zip(self.seq_lens.tolist(), self.workload.contexts, strict=True)
        ):
            blocks = cache[self.block_table[row].long()].double()  # [n, 2, block, heads, head]
            k, v = blocks.transpose(0, 1).flatten(1, 2)[:, :seq_len].repeat_interleave(GROUP, dim=2)
            tokens = slice(row * self.workload.query_len, (row + 1) * self.workload.query_len)
            q = self.qkv[tokens, :NUM_HEADS].double()
            scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
            positions = torch.arange(seq_len, device=DEVICE)
            hidden = positions > positions[context:, None]
            weights = scores.masked_fill(hidden, -float("inf")).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outputs)

    def error(self, config: Config, expected: torch.Tensor) -> float:
        self.output.fill_(float("nan"))
        for scratch in (self.segments.segm_output, self.segments.segm_max):
            scratch.fill_(float("nan"))
        self.layer(config, self.caches[0])
        return float((self.output.double() - expected).norm() / expected.norm())

    def seconds(self, config: Config) -> float:
        """A layer."""

        def layers() -> None:
            for kv_cache in self.caches:
                self.layer(config, kv_cache)

        return graph_seconds(layers) / len(self.caches)


def graph_seconds(function: Callable[[], Any], target: float = 0.02) -> float:
    """The median time of the replays of a CUDA graph of `function`, for about `target` seconds."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < target and len(times) < 50):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(np.median(times))


# ---- what the hardware gives ----


@triton.jit
def read_kernel(x_ptr, out_ptr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for i in tl.static_range(CHUNK // BLOCK):
        total |= tl.load(x_ptr + offsets + i * BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.max(total, axis=0))


def measure_ceilings(caches: list[torch.Tensor]) -> tuple[float, float]:
    """(bytes a second read from memory, FLOPs a second of a large matrix product)"""
    x = caches[0].view(torch.int32).view(-1)
    chunk = 32768
    out = torch.empty(x.numel() // chunk, dtype=torch.int32, device=DEVICE)
    seconds = graph_seconds(
        lambda: read_kernel[(len(out),)](x, out, CHUNK=chunk, BLOCK=4096, num_warps=4)
    )
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    c = torch.empty_like(a)
    return len(out) * chunk * 4 / seconds, 2 * 8192**3 / graph_seconds(
        lambda: torch.mm(a, b, out=c)
    )


# ---- configurations ----


def decode_configs() -> list[DecodeConfig]:
    whole = [
        DecodeConfig(tile, num_warps, num_stages, 1, 32)
        for tile, num_warps in [
            (16, 1),
            (16, 2),
            (32, 1),
            (32, 2),
            (32, 4),
            (64, 1),
            (64, 2),
            (64, 4),
            (128, 4),
        ]
        for num_stages in (2, 3, 4)
    ]
    summed = [
        DecodeConfig(tile, num_warps, 2, 1, 32, use_dot=False)
        for tile, num_warps in [(16, 1), (32, 2), (64, 4)]
    ]
    cut = [
        DecodeConfig(tile, num_warps, num_stages, num_segments, max(tile, 32))
        for tile, num_warps, num_stages in [
            (16, 1, 3),
            (32, 1, 3),
            (32, 2, 2),
            (32, 2, 3),
            (64, 2, 3),
            (64, 4, 3),
        ]
        for num_segments in (2, 4, 8, 16, 32)
    ]
    return whole + summed + cut


def prefill_configs() -> list[PrefillConfig]:
    return [
        PrefillConfig(block_m, tile, num_warps, num_stages)
        for block_m, num_warps in [(32, 4), (64, 4), (128, 4), (128, 8)]
        for tile in (32, 64, 128)
        for num_stages in (2, 3)
        if (block_m, tile, num_warps) != (128, 128, 4)  # its registers spill
    ]


def candidates_for(workload: Workload, configs: list[Config]) -> Iterator[Config]:
    """Those that are worth timing: programs for half of the device, none that only exit."""
    num_programs = len(workload.contexts) * NUM_KV_HEADS
    is_ragged = len(set(workload.contexts)) > 1
    for config in configs:
        if isinstance(config, PrefillConfig):
            yield config
        elif 64 <= num_programs * config.num_segments <= 16384 or config.num_segments == 32:
            yield config
            if is_ragged and config.num_segments > 1:  # how short a segment may be matters here
                yield replace(config, min_segment_tokens=256)
                yield replace(config, min_segment_tokens=512)


def heuristic(workload: Workload) -> Config:
    num_sms = num_compute_units(DEVICE)
    if workload.query_len == 1:
        return ops.get_decode_config(
            len(workload.contexts), NUM_KV_HEADS, HEAD_SIZE, DTYPE, num_sms
        )
    return ops.get_prefill_config(workload.query_len, GROUP, HEAD_SIZE, DTYPE)


@contextmanager
def launches_only_compile() -> Iterator[None]:
    """Inside, launching a kernel compiles it in the background; all are done at the end."""
    from triton.runtime._async_compile import AsyncCompileMode

    class Warmup:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return partial(self.kernel.warmup, grid=grid)

    names = ("kernel_decode_attention", "kernel_prefill_attention")
    kernels = {name: getattr(ops, name) for name in names}
    try:
        for name, kernel in kernels.items():
            setattr(ops, name, Warmup(kernel))
        with ThreadPoolExecutor() as executor, AsyncCompileMode(executor, ignore_errors=True):
            yield
    finally:
        for name, kernel in kernels.items():
            setattr(ops, name, kernel)


# ---- the report ----


def describe(config: Config) -> str:
    return " ".join(f"{key}={int(value)}" for key, value in asdict(config).items())


class Report:
    def __init__(self, out: TextIO | None, read_ceiling: float, matmul_ceiling: float) -> None:
        self.out, self.read_ceiling, self.matmul_ceiling = out, read_ceiling, matmul_ceiling

    def line(self, workload: Workload, label: str, config: str, seconds: float) -> None:
        read, flops = workload.kv_bytes / seconds, workload.flops / seconds
        if workload.query_len == 1:
            rate = f"{read / 1e12:6.2f} TB/s {read / self.read_ceiling:5.0%}"
        else:
            rate = f"{flops / 1e12:6.0f} TFLOP/s {flops / self.matmul_ceiling:5.0%}"
        print(f"  {label:9} {seconds * 1e6:8.1f} us a layer  {rate}  {config}", flush=True)
        self.write(
            workload=workload.name, label=label, config=config, us=seconds * 1e6,
            tb_per_s=read / 1e12, tflop_per_s=flops / 1e12,
            share_of_read=read / self.read_ceiling, share_of_matmul=flops / self.matmul_ceiling,
        )  # fmt: skip

    def write(self, **record: Any) -> None:
        if self.out is not None:
            self.out.write(json.dumps(record) + "\n")
            self.out.flush()


def tune(batch: Batch, configs: list[Config], report: Report, top: int) -> None:
    workload = batch.workload
    print(f"{workload.name}: {len(configs)} configurations", flush=True)
    timed: list[tuple[float, Config]] = []
    for config in configs:
        try:
            timed.append((batch.seconds(config), config))
        except triton.runtime.errors.OutOfResources:
            continue
    timed.sort(key=lambda pair: pair[0])
    for seconds, config in timed[:top]:
        report.line(workload, "", describe(config), seconds)
    for seconds, config in timed[top:]:
        report.write(workload=workload.name, config=describe(config), us=seconds * 1e6)
    chosen = heuristic(workload)
    report.line(workload, "heuristic", describe(chosen), batch.seconds(chosen))


def time_dense(caches: list[torch.Tensor], block_size: int, report: Report) -> None:
    """Dense attention of whole prompts, and what a length costs that cuDNN has not seen."""
    for num_tokens in (512, 1024, 2048, 4096, 8192):
        workload = Workload(f"prompt 1 x {num_tokens}", num_tokens, [0], num_layers=1)
        batch = Batch(workload, caches, block_size)
        query, key, value = batch.qkv.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        dense = dense_attention(query, key, value, SCALE)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        slots = (batch.block_table[0, :, None] * block_size).long()
        slots = (slots + torch.arange(block_size, device=DEVICE)).view(-1)[:num_tokens]
        reshape_and_cache_flash(key, value, caches[0], slots)
        chosen = heuristic(workload)
        batch.layer(chosen, caches[0])
        error = float((dense - batch.output).float().norm() / batch.output.float().norm())
        assert error < 2 * MAX_ERROR, f"dense and paged attention differ by {error}"
        print(f"{workload.name}: the first call takes {first * 1e3:.1f} ms", flush=True)
        report.write(workload=workload.name, first_call_ms=first * 1e3)
        report.line(workload, "paged", describe(chosen), batch.seconds(chosen))
        dense_seconds = graph_seconds(partial(dense_attention, query, key, value, SCALE))
        report.line(workload, "dense", "", dense_seconds)
        write_seconds = graph_seconds(
            partial(reshape_and_cache_flash, key, value, caches[0], slots)
        )
        print(f"  writing the cache {write_seconds * 1e6:.1f} us", flush=True)
        report.write(workload=workload.name, label="reshape_and_cache", us=write_seconds * 1e6)


def time_launches(batch: Batch, report: Report) -> None:
    """What a launch costs the host."""
    config = heuristic(batch.workload)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(300):
        batch.layer(config, batch.caches[0])
    host = (time.perf_counter() - start) / 300
    torch.cuda.synchronize()
    print(f"{batch.workload.name}: {host * 1e6:.1f} us of host time a launch", flush=True)
    report.write(workload=batch.workload.name, host_us=host * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="JSON lines")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--top", type=int, default=6, help="configurations printed a workload")
    parser.add_argument("--only", default="", help="workloads whose names contain this")
    args = parser.parse_args()
    start = time.perf_counter()

    def stamp(text: str) -> None:
        print(f"[{time.perf_counter() - start:5.1f} s] {text}", flush=True)

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    # Random numbers, not zeros: what the wires carry costs power, and so clock rate.
    num_blocks = 256 * -(-1216 // args.block_size)  # for the largest workload
    shape = (num_blocks, 2, args.block_size, NUM_KV_HEADS, HEAD_SIZE)
    caches = [torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(NUM_LAYERS)]
    read_ceiling, matmul_ceiling = measure_ceilings(caches)
    stamp(f"reads {read_ceiling / 1e12:.2f} TB/s, matmul {matmul_ceiling / 1e12:.0f} TFLOP/s")

    decodes = [
        Workload("C: decode 256 x 1096", 1, [1095] * 256),
        Workload("A: decode 256 x 100-2048", 1, rng.integers(100, 2048, 256).tolist()),
        Workload("decode 128 x 1096", 1, [1095] * 128),
        Workload("D: decode 64 x 4128, 4096 shared", 1, [4127] * 64, shared=4096),
        Workload("decode 64 x 1096", 1, [1095] * 64),
        Workload("decode 32 x 576", 1, [575] * 32),
        Workload("decode 8 x 1096", 1, [1095] * 8),
        Workload("B1: decode 1 x 256", 1, [255]),
        Workload("decode 1 x 4096", 1, [4095]),
        Workload("decode 1 x 16384", 1, [16383]),
    ]
    prefills = [
        Workload("B2: prompt 1 x 8192", 8192, [0], num_layers=2),
        Workload("prompt 16 x 512", 512, [0] * 16, num_layers=4),
        Workload("D: chunk 64 x 32 after 4096", 32, [4096] * 64, shared=4096, num_layers=4),
        Workload("chunk 1 x 2048 after 6144", 2048, [6144], num_layers=4),
    ]
    checked = {
        workload.query_len: Batch(workload, caches, args.block_size)
        for workload in (
            Workload("check", 1, [0, 16, 299, 1095, 4127], num_layers=1),
            Workload("check", 37, [0, 5, 300, 63], num_layers=1),
        )
    }
    sweeps: list[tuple[int, list[Config], list[Workload]]] = [
        (1, [*decode_configs()], decodes),
        (37, [*prefill_configs()], prefills),
    ]
    configs = {
        query_len: list(dict.fromkeys([*sweep, *map(heuristic, workloads)]))
        for query_len, sweep, workloads in sweeps
    }
    with launches_only_compile():
        for query_len, batch in checked.items():
            for config in configs[query_len]:
                batch.layer(config, caches[0])
    stamp(f"{sum(map(len, configs.values()))} configurations compiled")

    right: dict[int, list[Config]] = {}
    for query_len, batch in checked.items():
        expected = batch.expected()
        right[query_len] = []
        for config in configs[query_len]:
            try:
                error = batch.error(config, expected)
            except triton.runtime.errors.OutOfResources:
                continue
            if error < MAX_ERROR:
                right[query_len].append(config)
            else:
                print(f"WRONG, error {error}: {describe(config)}", flush=True)
    stamp(f"{len(right[1])} decode and {len(right[37])} prefill configurations are right")

    with open(args.out or "/dev/null", "w") as out:
        report = Report(out, read_ceiling, matmul_ceiling)
        report.write(read_tb_per_s=read_ceiling / 1e12, matmul_tflop_per_s=matmul_ceiling / 1e12)
        for workload in [*decodes, *prefills]:
            if args.only not in workload.name:
                continue
            batch = Batch(workload, caches, args.block_size)
            candidates = right[1] if workload.query_len == 1 else right[37]
            tune(batch, list(candidates_for(workload, candidates)), report, args.top)
            stamp("")
        if args.only in "prompt":
            time_dense(caches, args.block_size, report)
        time_launches(Batch(decodes[-3], caches, args.block_size), report)
        time_launches(Batch(prefills[1], caches, args.block_size), report)
    stamp("done")


if __name__ == "__main__":
    main()
