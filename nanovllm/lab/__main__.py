"""`python -m nanovllm.lab`: bytes moved against bytes needed, step by step.

Upstream: none.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from nanovllm.lab import memory_traffic as traffic
from nanovllm.lab.memory_traffic import AttentionShape, DecodeShape, Traffic


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nanovllm.lab", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--rows", type=int, default=16384, help="rows of the softmax")
    add("--cols", type=int, default=16384, help="row length of the softmax, in float32")
    add("--batch", type=int, default=1, help="sequences of the attention steps, in bfloat16")
    add("--seq-len", type=int, default=8192, help="tokens a sequence")
    add("--num-heads", type=int, default=16, help="query heads")
    add("--num-kv-heads", type=int, default=8, help="key and value heads")
    add("--head-size", type=int, default=128, help="elements a head")
    add("--block-m", type=int, default=128, help="queries a tile of FlashAttention")
    add("--block-n", type=int, default=64, help="keys a tile of FlashAttention")
    add("--num-splits", type=int, default=8, help="programs that share a sequence's keys")
    add("--bandwidth", type=float, help="memory bandwidth in GB/s; adds a column of times")
    return parser.parse_args()


def human(num_bytes: float) -> str:
    """1234567 -> '1.23 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def make_table(title: str, steps: Iterable[Traffic], bandwidth: float | None) -> Table:
    """One line a step; with a bandwidth, the time its bytes take at least."""
    table = Table(title=title, title_justify="left")
    table.add_column("step")
    columns = ["needed", "moved", "moved / needed", "FLOPs / byte needed"]
    for column in columns + (["ms at the bandwidth"] if bandwidth else []):
        table.add_column(column, justify="right")
    table.add_column("where the bytes go")
    for step in steps:
        cells = [human(step.needed), human(step.moved), f"{step.ratio:.3g}"]
        cells.append(f"{step.intensity:.3g}" if step.flops else "")
        if bandwidth:
            cells.append(f"{step.moved / bandwidth / 1e6:.3g}")
        table.add_row(step.step, *cells, step.note)
    return table


def main() -> None:
    args = parse_args()
    heads = (args.num_heads, args.num_kv_heads, args.head_size, 2)
    prefill = AttentionShape(args.batch, args.seq_len, *heads)
    decode = DecodeShape([args.seq_len] * args.batch, *heads)
    sizes = (args.rows, args.cols, 4)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    tables = {
        "One load of one warp, float32": [traffic.strided_load(n, 4) for n in (1, 2, 8, 4096)],
        f"Softmax of {args.rows} rows of {args.cols}, float32": [
            traffic.softmax_unfused(*sizes),
            traffic.softmax_online(*sizes),
            traffic.softmax_fused(*sizes),
        ],
        f"Causal attention, {args.batch} x {args.seq_len} tokens, bfloat16": [
            traffic.attention_unfused(prefill),
            traffic.attention_flash(prefill, args.block_m, args.block_n),
        ],
        f"Decode, {args.batch} x {args.seq_len} keys, bfloat16": [
            traffic.decode_gathered(decode),
            traffic.decode_head_by_head(decode),
            traffic.decode_paged(decode, args.num_splits),
        ],
    }
    for title, steps in tables.items():
        bandwidth = None if "warp" in title else args.bandwidth
        console.print(make_table(title, steps, bandwidth))


if __name__ == "__main__":
    main()
