"""`nanovllm estimate`: what a model needs and what it can reach, worked out on paper.

Every line shows its formula, the formula with the numbers in it, and the result; the results come
from v1/metrics/perf.py by way of v1/metrics/estimate.py. Weights are never read, and a published
shape needs no files at all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.engine.arg_utils import DEFAULT_MODEL, resolve_model
from nanovllm.exceptions import VLLMValidationError
from nanovllm.v1.metrics import perf
from nanovllm.v1.metrics.estimate import Estimate, Line, Section, fill, show
from nanovllm.v1.metrics.hardware import HARDWARE, MEASURED, get_hardware
from nanovllm.v1.metrics.perf import DTYPE_BYTES, PUBLISHED, RECOMPUTE, ModelShape

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPED_WIDTH = 100
MIN_WIDTH = 56
NAME_WIDTH, FORMULA_WIDTH, RESULT_WIDTH = 18, 62, 14
BATCH_SIZES = (1, 8, 32, 128, 512)

EPILOG = f"""\
Examples:
  nanovllm estimate                                  the model that comes with the package
  nanovllm estimate llama-2-7b --batch-size 32 --context-len 2048
  nanovllm estimate qwen3-0.6b --dtype int4 --hardware rtx4090
  nanovllm estimate ~/models/SmolLM2-135M/config.json --hardware measured
  nanovllm estimate gpt3-175b --training --train-tokens 300e9 --context-len 2048

MODEL is a checkpoint folder, a config.json, or a published shape:
  {", ".join(PUBLISHED)}
Hardware: {", ".join(HARDWARE)},
  or measured: copy and multiply on this machine for a few seconds.

All times are floors: each kernel as fast as memory and arithmetic allow, nothing between kernels.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb to the `nanovllm` command."""
    parser = subparsers.add_parser(
        "estimate",
        help="a model's memory, operations and speed on paper, with the formulas",
        description="Work out parameters, memory, operations and the best possible speed of a "
        "model from its config alone, and show the formulas.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=f"({DEFAULT_MODEL})")
    add("--batch-size", type=_count, default=1, metavar="N", help="requests in a step (1)")
    add("--prompt-len", type=_count, default=512, metavar="N", help="tokens of a prompt (512)")
    add(
        "--context-len",
        type=_count,
        metavar="N",
        help="tokens of a request that decodes, and of a training sequence "
        "(2048, or the model's longest)",
    )
    add(
        "--dtype",
        default="auto",
        choices=("auto", *DTYPE_BYTES),
        help="of the weights (auto: as in the checkpoint)",
    )
    add(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16", "fp8"),
        help="of keys and values (auto: as activations)",
    )
    add(
        "--group-size",
        type=_count,
        default=perf.DEFAULT_GROUP_SIZE,
        metavar="N",
        help="int4: weights that share a scale (128)",
    )
    add(
        "--hardware",
        default="h200",
        choices=(*HARDWARE, MEASURED),
        metavar="NAME",
        help="see below (h200)",
    )
    add("--device", default="auto", help="what --hardware measured measures: cpu, cuda, cuda:1")
    add("--gpu-memory-utilization", type=_share, default=0.92, metavar="X", help="(0.92)")
    add("--block-size", type=_count, default=16, metavar="N", help="tokens of a KV block (16)")
    # What vLLM's server takes on a GPU of 70 GiB or more.
    add("--max-num-batched-tokens", type=_count, default=8192, metavar="N", help="(8192)")
    add("--max-num-seqs", type=_count, default=1024, metavar="N", help="(1024)")
    add("--training", action="store_true", help="operations and memory of training, too")
    add("--train-tokens", type=_count, metavar="N", help="(20 a parameter: Hoffmann et al. 2022)")
    add("--recompute", default="none", choices=RECOMPUTE, help="activations to recompute (none)")
    add("--mfu", type=_share, default=0.4, metavar="X", help="share of the rate in training (0.4)")
    add("--json", action="store_true", help="print one JSON object")


def _count(text: str) -> int:
    """A number from 1; 300e9 will do."""
    try:
        number = int(text) if text.isdigit() else float(text)
    except ValueError:
        number = 0
    if not 1 <= number < float("inf") or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(number)


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return number


def run(args: argparse.Namespace) -> None:
    """Print the estimate.

    Raises:
        VLLMValidationError: the model cannot be read or estimated.
    """
    shape = load_shape(args.model, args.dtype)
    dtype = shape.dtype if args.dtype == "auto" else args.dtype
    estimate = Estimate(
        shape,
        get_hardware(args.hardware, perf.activation_dtype(dtype), args.device),
        args.batch_size,
        args.prompt_len,
        args.context_len,
        dtype,
        None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        args.group_size,
        args.gpu_memory_utilization,
        args.block_size,
        args.max_num_batched_tokens,
        args.max_num_seqs,
        args.training,
        args.train_tokens,
        args.recompute,
        args.mfu,
    )
    if args.json:
        print(json.dumps(estimate.to_dict(), indent=2))
    else:
        print_estimate(estimate)


def load_shape(model: str, dtype: str = "auto") -> ModelShape:
    """The shape of a checkpoint folder, a config.json or a published model.

    Raises:
        VLLMValidationError: there is none, it cannot be read, or its weights are quantized and
            `dtype` leaves open how.
    """
    if model in PUBLISHED and not os.path.exists(model):
        return PUBLISHED[model]
    path = Path(os.path.expanduser(model))
    if path.name == "config.json" and path.is_file():
        path = path.parent
    elif path.suffix == ".json":
        raise VLLMValidationError(
            f"{model!r} is no config.json; give one, or the folder it is in.", parameter="model"
        )
    try:
        folder = resolve_model(str(path))
    except VLLMValidationError as e:
        raise VLLMValidationError(
            f"model {model!r} is neither a folder, a config.json, the name of a model in the "
            f"package or the cache, nor a published shape ({', '.join(PUBLISHED)}).",
            parameter="model",
            value=model,
        ) from e
    from nanovllm.config import load_hf_config

    config = load_hf_config(folder)
    if getattr(config, "quantization_config", None) is not None and dtype == "auto":
        raise VLLMValidationError(
            f"the weights of {model!r} are quantized; say --dtype fp8, int8 or int4.",
            parameter="dtype",
        )
    return ModelShape.from_hf_config(config, name=model)


# ---- printing ----------------------------------------------------------------------------------


def print_estimate(estimate: Estimate) -> None:
    """All sections, then the roofline of other batch sizes and of other hardware."""
    from rich.console import Console
    from rich.markup import escape

    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(width=PIPED_WIDTH if piped else None, highlight=False)
    console.width = max(console.width, MIN_WIDTH)
    dtypes = f"{estimate.metrics.weight_dtype}, keys and values in {estimate.metrics.cache_dtype}"
    console.print(f"[bold]{escape(estimate.shape.name)}[/] in {dtypes}")
    console.print(_legend(estimate.shape), style="dim")
    for section in estimate.sections:
        console.print()
        console.print(_section_table(section, console.width))
        if section.note:
            console.print(section.note, style="dim")
        if section.key == "prefill_bytes":
            _print_roofline(estimate, console, estimate.prefill)
        if section.key == "decode_bytes":
            _print_roofline(estimate, console, estimate.decode)
    _print_batches(estimate, console)
    _print_hardware(estimate, console)


def _print_roofline(estimate: Estimate, console: Console, ctx: perf.ExecutionContext) -> None:
    kernels = perf.roofline(estimate.metrics, ctx, estimate.hardware)
    total = sum(kernel.seconds for kernel in kernels)
    flops, traffic = sum(k.flops for k in kernels), sum(k.num_bytes for k in kernels)
    ridge = estimate.hardware.ridge(estimate.metrics.weight_dtype)
    table = _table(
        f"roofline on {estimate.hardware.name}", "FLOP", "bytes", "FLOP/byte", "time", "", "limit"
    )
    for kernel in kernels:
        limit = "arithmetic" if kernel.compute_bound else "memory"
        table.add_row(
            kernel.name,
            show(kernel.flops, "FLOP") if kernel.flops else "-",
            show(kernel.num_bytes, "traffic"),
            f"{kernel.intensity:.1f}" if kernel.flops else "-",
            show(kernel.seconds, "s"),
            f"{kernel.seconds / total:.0%}",
            limit,
        )
    table.add_row(
        "[bold]step[/]",
        show(flops, "FLOP"),
        show(traffic, "traffic"),
        f"{flops / traffic:.1f}",
        f"[bold]{show(total, 's')}[/]",
        "",
        f"[bold]{show(ctx.total_num_tokens() / total, 'tok/s')}[/]",
    )
    _print_table(table, console)
    console.print(
        f"time = max(FLOP / rate, bytes / bandwidth): {estimate.hardware.name} has "
        f"{estimate.hardware.rate(estimate.metrics.weight_dtype) / 1e12:,.4g} TFLOP/s and "
        f"{estimate.hardware.bandwidth / 1e12:.4g} TB/s ({estimate.hardware.source}); they meet at "
        f"{ridge:,.0f} FLOP/byte, which a matrix reaches with about "
        f"{ridge * DTYPE_BYTES[estimate.metrics.weight_dtype] / 2:,.0f} tokens a step.",
        style="dim",
    )


def _print_batches(estimate: Estimate, console: Console) -> None:
    table = _table(
        "decode by batch", "context", "KV cache", "FLOP/byte", "step", "tok/s", "for each"
    )
    per_token = estimate.kv_bytes_per_token
    fitting = estimate.capacity(estimate.hardware).num_tokens // estimate.seq_len
    sizes = {size for size in BATCH_SIZES if size <= fitting} | {estimate.batch_size, fitting}
    for size in sorted(sizes - {0}):
        ctx = estimate.decode_at(size)
        seconds = estimate.seconds(ctx, estimate.hardware)
        stats = estimate.metrics.get_step_perf_stats_per_gpu(ctx)
        note = " does not fit" if size > fitting else " (all that fit)" * (size == fitting)
        table.add_row(
            f"{size:,}{note}",
            f"{estimate.seq_len:,}",
            show(size * estimate.seq_len * per_token, "bytes"),
            f"{stats.num_flops_per_gpu / stats.num_bytes_per_gpu:.1f}",
            show(seconds, "s"),
            show(size / seconds, ""),
            show(1 / seconds, ""),
        )
    _print_table(table, console)


def _print_hardware(estimate: Estimate, console: Console) -> None:
    table = _table(
        "hardware",
        "memory\nGiB",
        "TB/s",
        "TFLOP/s",
        "ridge\nFLOP/B",
        "KV tokens",
        "prefill",
        "tok/s",
        "decode",
        "tok/s",
    )
    for hardware in estimate.all_hardware():
        prefill = estimate.seconds(estimate.prefill, hardware)
        decode = estimate.seconds(estimate.decode, hardware)
        capacity = estimate.capacity(hardware)
        rate = hardware.rate(estimate.metrics.weight_dtype)
        table.add_row(
            hardware.name,
            f"{hardware.memory_bytes / 2**30:.1f}",
            f"{hardware.bandwidth / 1e12:.3g}",
            f"{rate / 1e12:,.3g}" if rate < 1e15 else f"{rate / 1e12:,.0f}",
            f"{hardware.ridge(estimate.metrics.weight_dtype):.0f}",
            f"{capacity.num_tokens:,}" if capacity.available_bytes > 0 else "does not fit",
            show(prefill, "s"),
            show(estimate.prefill.total_num_tokens() / prefill, ""),
            show(decode, "s"),
            show(estimate.batch_size / decode, ""),
        )
    _print_table(table, console)


def _print_table(table: Table, console: Console) -> None:
    """No column is cut: a terminal that is too narrow breaks the lines, which loses nothing."""
    width = console.width
    console.width = max(width, PIPED_WIDTH)
    console.print()
    console.print(table)
    console.width = width


def _legend(shape: ModelShape) -> str:
    return (
        f"L = {shape.num_hidden_layers} layers, D = {shape.hidden_size} hidden, q = "
        f"{shape.num_attention_heads} query and kv = {shape.num_key_value_heads} key-value heads "
        f"of d = {shape.head_dim}, DI = {shape.intermediate_size} in the MLP, V = "
        f"{shape.vocab_size} vocabulary, P = {shape.max_position_embeddings} positions, N all "
        "parameters.\n"
        "Memory in GiB = 2^30 bytes, traffic in GB = 10^9 bytes."
    )


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(titles[0], no_wrap=True, header_style="bold")
    for title in titles[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _section_table(section: Section, page_width: int) -> Table:
    from rich.table import Table

    # On a narrow page the formula is folded; names and results are never cut.
    formula_width = min(FORMULA_WIDTH, page_width - NAME_WIDTH - RESULT_WIDTH - 4)
    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, title_justify="left",
        title=f"[bold]{section.title}[/]", title_style="", show_header=False,
    )  # fmt: skip
    table.add_column(width=NAME_WIDTH, no_wrap=True)
    table.add_column(width=formula_width, overflow="fold")
    table.add_column(width=RESULT_WIDTH, justify="right", no_wrap=True)
    for line in section.lines:
        style = "bold" if line.name.startswith("total") else ""
        result = show(line.value, line.unit)
        formula = _formula_cell(line, section.symbols, formula_width)
        table.add_row(line.name, formula, result, style=style)
    return table


def _formula_cell(line: Line, symbols: Mapping[str, float], width: int) -> str:
    numbers = fill(line.formula, symbols)
    if numbers == line.formula or re.fullmatch(r"\w+", line.formula):
        return f"[dim]{numbers}[/]"
    if re.fullmatch(r"\w+( \+ \w+)*", line.formula) and len(line.formula) > width - 20:
        return "[dim]the sum of these[/]"
    gap = " = " if len(line.formula) + len(numbers) + 3 <= width else "\n= "
    return f"{line.formula}{gap}[dim]{numbers}[/]"
