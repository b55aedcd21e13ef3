"""The lab's kernels on a GPU, beside PyTorch's and FlashAttention 3, against what the GPU can do.

    python scripts/bench_lab.py --out lab.jsonl --plots plots
    python scripts/bench_lab.py --tune

First the ceilings are measured: bytes a second of a copy and of a read, FLOPs a second of a large
bfloat16 product. Then, at each size, every contender's result is compared with a float64 reference,
and all are timed in turn, repetition by repetition, so that a change of clocks meets all alike.

A time is that of a CUDA graph of several calls, divided by their number, so launching from Python
costs nothing. Where one call's data would fit into the L2 cache, the calls go round over copies of
it that together do not.

One JSON line a contender and size; the median over repetitions, with the fastest and the slowest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_common import read_kernel
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanovllm.lab import flash_attention as flash
from nanovllm.lab import online_softmax as online
from nanovllm.lab import paged_decode as paged
from nanovllm.lab import softmax as fused
from nanovllm.triton_utils import num_compute_units, triton

DEVICE = torch.device("cuda")
SOFTMAX_BYTES = 1 << 30
ROTATED_BYTES = 256 << 20  # five times the L2 cache
SHORT_ROWS = [256, 512, 1024, 2048, 4096, 5120, 8192, 16384, 32000]
LONG_ROWS = [131072, 262144, 1048576]
COMPILED_ROWS = [1024, 16384, 131072]  # torch.compile takes seconds for each
SEQ_LENS = [512, 1024, 2048, 4096, 8192, 16384]
ATTENTION_TOKENS = 16384
HEAD_SIZES = [64, 128]
DECODE_SIZES = [(1, 256), (1, 32768), (8, 8192), (32, 576), (64, 4096), (256, 1096)]

Record = dict[str, Any]
Calls = Sequence[Callable[[], object]]


@dataclass
class Ceilings:
    """What the GPU was measured to do: GB/s (1e9 bytes) and TFLOP/s."""

    copy: float
    read: float
    matmul: float


@dataclass
class Bench:
    """Records as they come: to a file, and kept for tables and plots."""

    args: argparse.Namespace
    records: list[Record] = field(default_factory=list)

    def add(self, **record: Any) -> None:
        self.records.append(record)
        if self.args.out:
            with self.args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def of(self, bench: str) -> list[Record]:
        return [record for record in self.records if record["bench"] == bench]


# ---- timing -------------------------------------------------------------------------------------


def capture(calls: Calls) -> torch.cuda.CUDAGraph:
    """A graph of the calls in a row, after two calls that compile and allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def measure(contenders: dict[str, Calls], reps: int, rep_ms: float = 10.0) -> dict[str, Record]:
    """Milliseconds a call of each contender: median, fastest and slowest repetition.

    Args:
        contenders: name -> calls that do the same work on different copies of the data.
        reps: repetitions, each of them over all contenders.
        rep_ms: how long a repetition replays a contender's graph, at least.
    """
    graphs = {name: capture(calls) for name, calls in contenders.items()}
    times: dict[str, int] = {}
    for name, graph in graphs.items():
        replay_ms(graph, 1)
        times[name] = max(1, math.ceil(rep_ms / replay_ms(graph, 2)))
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(reps):
        for name, graph in graphs.items():
            samples[name].append(replay_ms(graph, times[name]) / len(contenders[name]))
    return {
        name: {
            "ms": statistics.median(values),
            "ms_min": min(values),
            "ms_max": max(values),
            "reps": reps,
        }
        for name, values in samples.items()
    }


def rotate(make: Callable[[int], Any], num_bytes: int, at_least: int = 1) -> list[Any]:
    """Copies of the data (made from different seeds) that together exceed the L2 cache."""
    return [make(seed) for seed in range(max(at_least, math.ceil(ROTATED_BYTES / num_bytes)))]


def calls_over(function: Callable[..., object], data: list[Any], at_least: int = 4) -> Calls:
    """At least so many calls, so that the gaps between graphs are small beside the graphs."""
    rounds = math.ceil(at_least / len(data))
    return [partial(function, *x) for x in data] * rounds


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, dtype=dtype, generator=generator)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    assert out.isfinite().all()
    return ((out.double() - reference).norm() / reference.norm()).item()


def check(name: str, error: float, dtype: torch.dtype) -> float:
    """A wrong kernel is not worth timing."""
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    if not error < limit:
        raise SystemExit(f"{name}: relative error {error:.3g}, at most {limit:g} is allowed.")
    return error


# ---- ceilings -----------------------------------------------------------------------------------


def measure_ceilings(bench: Bench, when: str) -> Ceilings:
    x = randn(1 << 29, dtype=torch.float32, seed=0)  # 2 GB
    y = torch.empty_like(x)
    a, b, c, d = (randn(8192, 8192, dtype=torch.bfloat16, seed=i) for i in range(4))
    programs = x.numel() // (4096 * 16)
    sums = torch.empty(programs, device=DEVICE)

    def read(source: torch.Tensor) -> None:
        read_kernel[(programs,)](source, sums, BLOCK=4096, TILES=16, num_warps=8)

    contenders: dict[str, Calls] = {
        # A kernel that reads and writes: y.copy_(x) in a graph is a job for the copy engine, which
        # is slower.
        "copy": [lambda: torch.neg(x, out=y)] * 4,
        "read": [partial(read, x), partial(read, y)] * 2,
        "sum": [partial(torch.sum, x), partial(torch.sum, y)] * 2,
        "matmul": [lambda: a @ b, lambda: c @ d] * 2,
    }
    times = measure(contenders, bench.args.reps, rep_ms=20)
    rates = {
        "copy": 2 * x.nbytes / times["copy"]["ms"] / 1e6,
        "read": x.nbytes / min(times["read"]["ms"], times["sum"]["ms"]) / 1e6,
        "matmul": 2 * 8192**3 / times["matmul"]["ms"] / 1e9,
    }
    bench.add(
        bench="ceilings", when=when, gpu=torch.cuda.get_device_name(), torch=torch.__version__,
        triton=triton.__version__, copy_GBps=rates["copy"], read_GBps=rates["read"],
        matmul_TFLOPs=rates["matmul"], times=times,
    )  # fmt: skip
    print(
        f"ceilings, {when}: copy {rates['copy']:.0f} GB/s (read + written), read "
        f"{rates['read']:.0f} GB/s, bfloat16 8192^3 {rates['matmul']:.0f} TFLOP/s",
        flush=True,
    )
    return Ceilings(**rates)


# ---- (a) softmax --------------------------------------------------------------------------------


def softmax_data(cols: int, dtype: torch.dtype) -> list[tuple[torch.Tensor]]:
    """Two matrices of SOFTMAX_BYTES, each far larger than the L2 cache."""
    rows = SOFTMAX_BYTES // (cols * dtype.itemsize)
    return [(randn(rows, cols, dtype=dtype, seed=seed) * 3,) for seed in range(2)]


def bench_softmax(bench: Bench, ceilings: Ceilings) -> None:
    dtype = getattr(torch, bench.args.softmax_dtype)
    for cols in SHORT_ROWS + LONG_ROWS:
        functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "torch eager": partial(torch.softmax, dim=-1)
        }
        if cols in COMPILED_ROWS:
            torch.compiler.reset()
            functions["torch.compile"] = torch.compile(
                lambda x: torch.softmax(x, dim=-1), dynamic=False
            )
        if cols in SHORT_ROWS:
            functions["fused"] = fused.softmax
        functions["online"] = online.online_softmax

        data = softmax_data(cols, dtype)
        x = data[0][0]
        some = torch.linspace(0, len(x) - 1, min(len(x), 16), device=DEVICE).long()
        reference = torch.softmax(x[some].double(), -1)
        errors = {
            name: check(name, relative_error(function(x)[some], reference), dtype)
            for name, function in functions.items()
        }
        calls = {name: calls_over(function, data) for name, function in functions.items()}
        for name, times in measure(calls, bench.args.reps).items():
            needed = 2 * x.nbytes / times["ms"] / 1e6
            # The online kernel reads twice; what it asks of memory is half as much again.
            counted = needed * 1.5 if name == "online" else needed
            bench.add(
                bench="softmax", contender=name, rows=len(x), cols=cols, dtype=str(dtype),
                GBps=needed, share_of_copy=needed / ceilings.copy, GBps_counted=counted,
                share_of_copy_counted=counted / ceilings.copy, relative_error=errors[name], **times,
            )  # fmt: skip
        del calls, data, x
        torch.cuda.empty_cache()


# ---- (b) attention ------------------------------------------------------------------------------


def qkv(seq_len: int, head_size: int, heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    batch = ATTENTION_TOKENS // seq_len
    return [
        randn(batch, seq_len, n, head_size, dtype=torch.bfloat16, seed=3 * seed + i)
        for i, n in enumerate((heads, kv_heads, kv_heads))
    ]


def sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def attention_error(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Of the last head of the last sequence, its first 128 queries and its last 128."""
    seq_len = q.shape[1]
    q, k, v, out = (x[-1:, :, -1:] for x in (q, k, v, out))
    k, v = k.double(), v.double()
    n = min(seq_len, 128)
    first = flash.attention_reference(q[:, :n].double(), k[:, :n], v[:, :n])
    last = flash.attention_reference(q[:, -n:].double(), k, v)
    return max(relative_error(out[:, :n], first), relative_error(out[:, -n:], last))


def bench_attention(bench: Bench, ceilings: Ceilings) -> None:
    heads, kv_heads = bench.args.num_heads, bench.args.num_kv_heads or bench.args.num_heads
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "lab flash": flash.flash_attention,
        "SDPA flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    }
    for head_size, seq_len in product(HEAD_SIZES, SEQ_LENS):
        data = [qkv(seq_len, head_size, heads, kv_heads, seed) for seed in range(2)]
        q = data[0][0]
        errors = {
            name: check(name, attention_error(function(*data[0]), *data[0]), q.dtype)
            for name, function in functions.items()
        }
        calls = {name: calls_over(function, data) for name, function in functions.items()}
        flops = 4 * q.shape[0] * heads * seq_len**2 * head_size / 2  # causal: half
        for name, times in measure(calls, bench.args.reps).items():
            rate = flops / times["ms"] / 1e9
            bench.add(
                bench="attention", contender=name, batch=q.shape[0], seq_len=seq_len,
                num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, TFLOPs=rate,
                share_of_matmul=rate / ceilings.matmul, relative_error=errors[name], **times,
            )  # fmt: skip
        del calls, data, q
        torch.cuda.empty_cache()


# ---- (c) paged decode ---------------------------------------------------------------------------

DECODE_HEADS, DECODE_KV_HEADS, DECODE_HEAD_SIZE = 16, 8, 128  # Qwen3-0.6B's


@dataclass
class DecodeData:
    """One layer's cache with its sequences, their blocks in random order."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor


def decode_data(batch: int, context: int, block_size: int, seed: int) -> DecodeData:
    blocks = math.ceil(context / block_size)
    num_blocks = batch * blocks
    shape = (num_blocks, 2, block_size, DECODE_KV_HEADS, DECODE_HEAD_SIZE)
    return DecodeData(
        q=randn(batch, DECODE_HEADS, DECODE_HEAD_SIZE, dtype=torch.bfloat16, seed=seed),
        kv_cache=randn(*shape, dtype=torch.bfloat16, seed=seed + 1000),
        block_tables=torch.randperm(num_blocks, device=DEVICE).int().view(batch, blocks),
        seq_lens=torch.full((batch,), context, device=DEVICE, dtype=torch.int32),
    )


def lab_decode(
    data: DecodeData, context: int, config: paged.PagedDecodeConfig | None = None
) -> torch.Tensor:
    return paged.paged_decode(
        data.q, data.kv_cache, data.block_tables, data.seq_lens, max_seq_len=context, config=config
    )


def fa3_decode(cu_seqlens_q: torch.Tensor, data: DecodeData, context: int) -> torch.Tensor:
    """vLLM's build of FlashAttention 3; the arguments are those of its schema, in order."""
    k, v = data.kv_cache.unbind(1)
    return torch.ops._vllm_fa3_C.fwd(
        data.q, k, v, None, None, None, None, cu_seqlens_q, None, None, None, data.seq_lens, 1,
        context, data.block_tables, None, None, None, None, None, None, None, None,
        DECODE_HEAD_SIZE**-0.5, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None,
    )[0]  # fmt: skip


def decode_error(out: torch.Tensor, data: DecodeData) -> float:
    """Of the first and the last sequence."""
    ends = [0, len(out) - 1]
    reference = paged.paged_decode_reference(
        data.q[ends].double(), data.kv_cache.double(), data.block_tables[ends], data.seq_lens[ends]
    )
    return relative_error(out[ends], reference)


def bench_decode(bench: Bench, ceilings: Ceilings) -> None:
    if bench.args.fa3:
        torch.ops.load_library(str(bench.args.fa3))
    for block_size, (batch, context) in product(bench.args.block_sizes, DECODE_SIZES):
        kv_bytes = 2 * batch * context * DECODE_KV_HEADS * DECODE_HEAD_SIZE * 2
        make = partial(decode_data, batch, context, block_size)
        data = [(x, context) for x in rotate(make, kv_bytes)]
        functions: dict[str, Callable[..., torch.Tensor]] = {"lab paged": lab_decode}
        if bench.args.fa3:
            cu_seqlens_q = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
            functions["FlashAttention 3"] = partial(fa3_decode, cu_seqlens_q)
        errors = {
            name: check(name, decode_error(function(*data[0]), data[0][0]), torch.bfloat16)
            for name, function in functions.items()
        }
        calls = {name: calls_over(function, data) for name, function in functions.items()}
        for name, times in measure(calls, bench.args.reps).items():
            rate = kv_bytes / times["ms"] / 1e6
            bench.add(
                bench="decode", contender=name, batch=batch, context=context,
                block_size=block_size, GBps=rate, share_of_read=rate / ceilings.read,
                relative_error=errors[name], **times,
            )  # fmt: skip
        del calls, data
        torch.cuda.empty_cache()


# ---- tuning -------------------------------------------------------------------------------------


def try_configs(
    bench: Bench, kernel: str, size: dict[str, int], chosen: Any,
    configs: Iterable[tuple[int, ...]], make_calls: Callable[[Any], Calls],
) -> None:  # fmt: skip
    """Times each configuration that fits on the chip; prints the best three and the chosen one.

    `chosen` is a kernel's configuration, a named tuple; `configs` are plain tuples like it.
    """
    times: dict[tuple[int, ...], float] = {}
    for config in dict.fromkeys([tuple(chosen), *configs]):
        try:
            times[config] = measure({"": make_calls(type(chosen)(*config))}, 3, rep_ms=4)[""]["ms"]
        except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError):
            torch.cuda.synchronize()
    ranked = sorted(times, key=times.__getitem__)
    bench.add(
        bench="tune", kernel=kernel, size=size, fields=chosen._fields, chosen=chosen,
        ranked=[[list(config), times[config]] for config in ranked],
    )  # fmt: skip
    top = "  ".join(f"{config} {times[config]:.4f}" for config in ranked[:3])
    mine = times.get(tuple(chosen), math.nan)
    print(f"{kernel} {size}: {top} | chosen {tuple(chosen)} {mine:.4f} ms", flush=True)
    torch.cuda.empty_cache()


def tune_softmax(bench: Bench) -> None:
    dtype = getattr(torch, bench.args.softmax_dtype)
    for cols in SHORT_ROWS:
        data = softmax_data(cols, dtype)

        def calls(config: fused.SoftmaxConfig, data: list[Any] = data) -> Calls:
            return calls_over(partial(fused.softmax, config=config), data)

        configs: list[tuple[int, ...]] = [
            (rows, warps)
            for rows, warps in product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32))
            if 8 <= rows * cols / (32 * warps) <= 64 and (rows == 1 or rows * cols <= 16384)
        ]
        try_configs(bench, "softmax", {"cols": cols}, fused.choose_config(cols), configs, calls)
    for cols in LONG_ROWS:
        data = softmax_data(cols, dtype)
        rows = len(data[0][0])

        def online_calls(config: online.OnlineSoftmaxConfig, data: list[Any] = data) -> Calls:
            return calls_over(partial(online.online_softmax, config=config), data)

        sms = num_compute_units(DEVICE)
        splits = {1, *(max(1, n * sms // rows) for n in (4, 16, 64))}
        online_configs: list[tuple[int, ...]] = [
            (block, n, warps, stages)
            for block, n, warps, stages in product(
                (2048, 4096, 8192, 16384), sorted(splits), (8, 16, 32), (1, 2, 3)
            )
            if 8 <= block / (32 * warps) <= 16
        ]
        size = {"rows": rows, "cols": cols}
        online_chosen = online.choose_config(rows, cols, dtype.itemsize, sms)
        try_configs(bench, "online", size, online_chosen, online_configs, online_calls)


def tune_attention(bench: Bench) -> None:
    heads, kv_heads = bench.args.num_heads, bench.args.num_kv_heads or bench.args.num_heads
    tiles = [(128, 128, 8), (128, 64, 8), (64, 128, 4), (64, 64, 4), (128, 64, 4), (128, 32, 8)]
    configs = [(m, n, warps, stages) for (m, n, warps), stages in product(tiles, (2, 3, 4))]
    for head_size, seq_len in product(HEAD_SIZES, (1024, 8192)):
        data = [qkv(seq_len, head_size, heads, kv_heads, seed) for seed in range(2)]

        def calls(config: flash.FlashAttentionConfig, data: list[Any] = data) -> Calls:
            return calls_over(partial(flash.flash_attention, config=config), data)

        size = {"head_size": head_size, "seq_len": seq_len}
        chosen = flash.choose_config(head_size, torch.bfloat16)
        try_configs(bench, "flash", size, chosen, configs, calls)


def tune_decode(bench: Bench) -> None:
    tiles = [(32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 5), (128, 4, 3), (128, 8, 3), (32, 2, 4)]
    sms = num_compute_units(DEVICE)
    for batch, context in DECODE_SIZES:
        kv_bytes = 2 * batch * context * DECODE_KV_HEADS * DECODE_HEAD_SIZE * 2
        make = partial(decode_data, batch, context, bench.args.block_sizes[0])
        data = [(x, context) for x in rotate(make, kv_bytes)]

        def calls(config: paged.PagedDecodeConfig, data: list[Any] = data) -> Calls:
            return calls_over(partial(lab_decode, config=config), data)

        programs = batch * DECODE_KV_HEADS
        splits = {1, *(min(math.ceil(n * sms / programs), context // 64) for n in (2, 4, 8, 16))}
        configs: list[tuple[int, ...]] = [
            (n, num_splits, warps, stages)
            for (n, warps, stages), num_splits in product(tiles, sorted(splits - {0}))
        ]
        chosen = paged.choose_config(batch, DECODE_KV_HEADS, context, torch.bfloat16, sms)
        try_configs(bench, "paged", {"batch": batch, "context": context}, chosen, configs, calls)


# ---- output -------------------------------------------------------------------------------------


def spread(record: Record) -> str:
    return f"{100 * (record['ms_max'] - record['ms_min']) / record['ms']:.1f}%"


def print_tables(bench: Bench) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    layouts: dict[str, tuple[list[str], str, list[str]]] = {
        "softmax": (["rows", "cols"], "GBps", ["share_of_copy", "share_of_copy_counted"]),
        "attention": (["head_size", "batch", "seq_len"], "TFLOPs", ["share_of_matmul"]),
        "decode": (["block_size", "batch", "context"], "GBps", ["share_of_read"]),
    }
    for name, (sizes, rate, shares) in layouts.items():
        if not bench.of(name):
            continue
        table = Table(title=name, title_justify="left")
        for column in [*sizes, "contender", "ms", "spread", rate, *shares, "relative error"]:
            table.add_column(column, justify="left" if column == "contender" else "right")
        for record in bench.of(name):
            table.add_row(
                *(str(record[size]) for size in sizes), record["contender"],
                f"{record['ms']:.4f}", spread(record), f"{record[rate]:.0f}",
                *(f"{100 * record[share]:.1f}%" for share in shares),
                f"{record['relative_error']:.1e}",
            )  # fmt: skip
        console.print(table)


def lines(records: list[Record], x: str, y: str) -> Iterator[tuple[str, list[int], list[float]]]:
    for name in dict.fromkeys(record["contender"] for record in records):
        mine = [record for record in records if record["contender"] == name]
        yield name, [record[x] for record in mine], [record[y] for record in mine]


def plot(bench: Bench, ceilings: Ceilings, folder: Path) -> None:
    """softmax.png, attention.png and decode.png, of what was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name()

    def finish(name: str, axes: Any, ceiling: float, label: str) -> None:
        axes.axhline(ceiling, color="black", linestyle="--", linewidth=1, label=label)
        axes.set_ylim(0, 1.25 * max(axes.get_ylim()[1], ceiling))  # room for the legend
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=3, loc="upper center")
        axes.figure.tight_layout()
        axes.figure.savefig(folder / f"{name}.png", dpi=120)

    if records := bench.of("softmax"):
        _, axes = plt.subplots(figsize=(8, 4.5))
        for name, xs, ys in lines(records, "cols", "GBps"):
            axes.plot(xs, ys, marker="o", label=name)
        twice = [record for record in records if record["contender"] == "online"]
        axes.plot(
            [record["cols"] for record in twice], [record["GBps_counted"] for record in twice],
            marker="o", linestyle=":", color="gray", label="online, counting its second read",
        )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"row length ({bench.args.softmax_dtype})")
        axes.set_ylabel("GB/s, one read and one write")
        axes.set_title(f"Softmax of {SOFTMAX_BYTES / 1e9:.2f} GB on {gpu}", fontsize=10)
        finish("softmax", axes, ceilings.copy, "measured copy")
    if records := bench.of("attention"):
        _, row = plt.subplots(1, len(HEAD_SIZES), figsize=(11, 4.5), sharey=True)
        for axes, head_size in zip(row, HEAD_SIZES, strict=True):
            mine = [record for record in records if record["head_size"] == head_size]
            for name, xs, ys in lines(mine, "seq_len", "TFLOPs"):
                axes.plot(xs, ys, marker="o", label=name)
            axes.set_xscale("log", base=2)
            axes.set_xlabel("sequence length")
            axes.set_ylabel("TFLOP/s, causal counted as half")
            axes.set_title(f"Attention, head size {head_size}, on {gpu}", fontsize=10)
            finish("attention", axes, ceilings.matmul, "measured product of 8192^3")
    if records := bench.of("decode"):
        _, axes = plt.subplots(figsize=(8, 4.5))
        names = list(dict.fromkeys(record["contender"] for record in records))
        sizes = list(dict.fromkeys((r["block_size"], r["batch"], r["context"]) for r in records))
        width = 0.8 / len(names)
        for i, (name, _, ys) in enumerate(lines(records, "batch", "GBps")):
            axes.bar([x + i * width for x in range(len(sizes))], ys, width, label=name)
        centre = (len(names) - 1) * width / 2
        ticks = [f"{batch} x {context}, pages of {block}" for block, batch, context in sizes]
        axes.set_xticks([x + centre for x in range(len(sizes))], ticks, fontsize=8)
        axes.tick_params(axis="x", labelrotation=40)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
        axes.set_ylabel("GB/s of keys and values")
        axes.set_title(f"Paged decode, sequences x keys, on {gpu}", fontsize=10)
        finish("decode", axes, ceilings.read, "measured read")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    parts = ["softmax", "attention", "decode"]
    add("--only", nargs="+", choices=parts, default=parts, help="which parts to run")
    add("--out", type=Path, help="JSON lines are appended here")
    add("--reps", type=int, default=5)
    add("--plots", type=Path, help="folder for PNGs; needs matplotlib")
    add("--tune", action="store_true", help="try configurations instead, and print the best")
    add("--softmax-dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    add("--num-heads", type=int, default=16, help="of attention")
    add("--num-kv-heads", type=int, help="of attention; as many as --num-heads if not given")
    add("--block-sizes", type=int, nargs="+", default=[16], help="slots a page of the KV cache")
    add("--fa3", type=Path, help="vLLM's FlashAttention 3 library, _vllm_fa3_C.abi3.so")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_lab.py needs a CUDA device.")
    bench = Bench(args)
    if args.tune:
        tuners = {"softmax": tune_softmax, "attention": tune_attention, "decode": tune_decode}
        for part in args.only:
            tuners[part](bench)
        return
    ceilings = measure_ceilings(bench, "before")
    torch.cuda.empty_cache()
    benches = {"softmax": bench_softmax, "attention": bench_attention, "decode": bench_decode}
    for part in args.only:
        benches[part](bench, ceilings)
    print_tables(bench)
    measure_ceilings(bench, "after")
    if args.plots:
        plot(bench, ceilings, args.plots)


if __name__ == "__main__":
    main()
