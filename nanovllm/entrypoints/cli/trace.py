"""`nanovllm trace`: run prompts and show what every step of the engine did.

The trace goes to standard output, the engine's messages to standard error.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.entrypoints.cli.generate import (
    SAMPLING_FIELDS,
    _add_sampling_args,
    _messages,
    _params_for_each,
    _read_prompts,
)
from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from nanovllm.trace.step_trace import EngineInfo, Trace
    from nanovllm.v1.metrics.hardware import Hardware

DEFAULT_MAX_TOKENS = 8
# An engine small enough to be looked at: blocks that fill up within a sentence, few enough of them
# to draw, and a budget that a prompt can exceed. --full-size leaves the engine's own defaults.
SMALL_ENGINE = {
    "block_size": 4,
    "num_gpu_blocks_override": 32,
    "max_model_len": 124,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
}

EPILOG = """\
Examples:
  nanovllm trace "Once upon a time"
  nanovllm trace "Once upon a time there was a dog" "Once upon a time there was a cat" --arrive 0,2
      the second prompt finds the first one's blocks in the prefix cache
  nanovllm trace "The cat sat" "The dog ran" --max-tokens 24 --num-gpu-blocks-override 9
      too few blocks for both: one is preempted and comes back
  nanovllm trace "Once upon a time there was a" --watch A --temperature 0.8 --top-k 20 \\
      --top-p 0.9 --seed 0
      how each token was chosen
  nanovllm trace "One" "Two" --quiet --html trace.html --perfetto trace.json --jsonl trace.jsonl
  nanovllm trace --from trace.jsonl --steps 3-5

Requests are called A, B, C ... in the order of the prompts. The engine is a small one, so that its
memory can be drawn: %(small)s.
Every engine flag changes that; --full-size takes the engine's own defaults.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb to the `nanovllm` command."""
    small = ", ".join(f"--{name.replace('_', '-')} {n}" for name, n in SMALL_ENGINE.items())
    small = small.replace(", --max-num-batched", ",\n--max-num-batched")
    parser = subparsers.add_parser(
        "trace",
        help="show what every step of the engine does",
        description="Run one or more prompts and show what every step of the engine does.",
        usage="nanovllm trace [flags] PROMPT...",
        epilog=EPILOG % {"small": small},
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("prompts", nargs="*", metavar="PROMPT", help="text; - is standard input")
    prompts.add_argument("--prompt-file", metavar="FILE", help="as for nanovllm generate")
    prompts.add_argument(
        "--chat", action="store_true", help="a prompt is a user's message: apply the chat template"
    )
    prompts.add_argument("--system", metavar="TEXT", help="system message before it, with --chat")
    prompts.add_argument(
        "--arrive",
        type=_numbers,
        metavar="N,N,...",
        help="one number a prompt: it arrives after so many steps (default: all at once)",
    )

    view = parser.add_argument_group("what to show")
    view.add_argument(
        "--watch",
        action="append",
        default=[],
        metavar="REQUEST",
        help="how this request's tokens are chosen: A or 0 is the first; may be repeated",
    )
    view.add_argument(
        "--watch-step", type=_step_range, metavar="A[-B]", help="watch in these steps only"
    )
    view.add_argument(
        "--steps", type=_step_range, metavar="A[-B]", help="print these steps only, from 1"
    )
    view.add_argument(
        "--hardware",
        metavar="NAME",
        help="also operations and bytes of each step and their shares of what this hardware can "
        "do: h200, rtx4090 ... as for nanovllm estimate, or measured (this machine)",
    )
    view.add_argument("-q", "--quiet", action="store_true", help="print nothing, write files only")
    view.add_argument(
        "--jsonl", metavar="FILE", help="write the trace: a line about the run, then one a step"
    )
    view.add_argument(
        "--perfetto", metavar="FILE", help="write a timeline for https://ui.perfetto.dev"
    )
    view.add_argument("--html", metavar="FILE", help="write a page that any browser shows")
    view.add_argument(
        "--from",
        dest="from_file",
        metavar="FILE",
        help="show a trace that --jsonl wrote; runs nothing",
    )

    sampling = parser.add_argument_group("sampling")
    _add_sampling_args(sampling)
    for action in sampling._group_actions:
        if action.dest == "max_tokens":
            action.help = f"tokens to generate at most (default: {DEFAULT_MAX_TOKENS})"
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--full-size", action="store_true", help="the engine's own defaults instead of a small one"
    )
    EngineArgs.add_cli_args(engine)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 0,0,3") from None


def _step_range(text: str) -> range:
    """ "3" or "3-5"."""
    first, dash, last = text.partition("-")
    try:
        numbers = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 3 or 3-5") from None
    if not numbers or numbers.start < 1:
        raise argparse.ArgumentTypeError(f"{text!r} names no step; they are counted from 1")
    return numbers


def run(args: argparse.Namespace) -> None:
    """Take the trace, or read it, and show it.

    Raises:
        VLLMValidationError: a mistake of the user's.
    """
    from nanovllm.trace.text import TraceView, make_console

    shown: Callable[[int], bool] = (
        (lambda step: True) if args.steps is None else args.steps.__contains__
    )
    view = None if args.quiet else TraceView(make_console())
    if args.from_file is not None:
        trace = _read_trace(args.from_file)
        if view is not None:
            view.print_header(trace.engine, _hardware(args, trace.engine))
        for step in trace:
            if view is not None and shown(step.step):
                view.print_step(step)
    else:
        trace = _take_trace(args, view, shown)
    if view is not None:
        view.print_summary(trace.requests)
    _write_files(trace, args)


def _take_trace(args: argparse.Namespace, view: Any, shown: Callable[[int], bool]) -> Trace:
    from nanovllm.sampling_params import SamplingParams

    if not args.prompts and args.prompt_file is None:
        raise VLLMValidationError(
            'there is no prompt; try: nanovllm trace "Once upon a time", or --prompt-file FILE.'
        )
    prompts = _read_prompts(args)
    given = {name: getattr(args, name) for name in SAMPLING_FIELDS if hasattr(args, name)}
    SamplingParams(**given)
    if args.system is not None and not args.chat:
        raise VLLMValidationError("--system needs --chat.")
    if args.quiet:
        logging.getLogger("nanovllm").setLevel(logging.WARNING)

    from nanovllm.entrypoints.llm import LLM
    from nanovllm.trace import trace
    from nanovllm.trace.run import engine_info

    llm = LLM.from_engine_args(_engine_args(args))
    defaults = {"max_tokens": DEFAULT_MAX_TOKENS} | llm.model_config.get_diff_sampling_param()
    params = _params_for_each(SamplingParams(**defaults | given), len(prompts))
    if args.chat:
        prompts = [llm.preprocess_chat(_messages(prompt, args.system)) for prompt in prompts]
    if view is not None:
        view.print_header(engine_info(llm), _hardware(args, engine_info(llm)))
    return trace(
        llm,
        prompts,
        params,
        arrivals=args.arrive,
        watch=args.watch,
        watch_step=(lambda step: args.watch_step is None or step in args.watch_step),
        on_step=lambda step: view.print_step(step) if view and shown(step.step) else None,
    )


def _hardware(args: argparse.Namespace, engine: EngineInfo) -> Hardware | None:
    from nanovllm.v1.metrics.hardware import get_hardware

    if args.hardware is None:
        return None
    if engine.model_shape is None:
        raise VLLMValidationError(
            "the trace does not say how large the model is; take a new one for --hardware.",
            parameter="hardware",
        )
    return get_hardware(args.hardware, engine.dtype, engine.device)


def _engine_args(args: argparse.Namespace) -> EngineArgs:
    """What the user gave; for the rest a small engine, as far as that goes with it."""
    given = {name for name in SMALL_ENGINE if hasattr(args, name)}
    small = {} if args.full_size else {k: v for k, v in SMALL_ENGINE.items() if k not in given}
    if hasattr(args, "kv_cache_memory_bytes"):
        small.pop("num_gpu_blocks_override", None)
    # The longest request has to fit in the blocks, whichever of the two the user has set.
    both = vars(args) | small
    block_size, num_blocks = both.get("block_size"), both.get("num_gpu_blocks_override")
    if block_size and num_blocks and "max_model_len" in small:
        small["max_model_len"] = min(small["max_model_len"], max((num_blocks - 1) * block_size, 1))
    elif block_size and "num_gpu_blocks_override" in small:
        needed = -(-both["max_model_len"] // block_size) + 1
        small["num_gpu_blocks_override"] = max(small["num_gpu_blocks_override"], needed)
    for name, value in small.items():
        setattr(args, name, value)
    return EngineArgs.from_cli_args(args)


def _read_trace(name: str) -> Trace:
    from nanovllm.trace import Trace

    try:
        return Trace.from_jsonl(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        raise VLLMValidationError(
            f"trace {name!r} cannot be read: {reason}.", parameter="from"
        ) from None


def _write_files(trace: Trace, args: argparse.Namespace) -> None:
    from nanovllm.trace.html import to_html
    from nanovllm.trace.perfetto import to_perfetto

    forms = ((args.jsonl, trace.to_jsonl), (args.perfetto, lambda: to_perfetto(trace)))
    for name, make in (*forms, (args.html, lambda: to_html(trace))):
        if name is None:
            continue
        try:
            Path(name).write_text(make(), encoding="utf-8")
        except OSError as e:
            raise VLLMValidationError(f"{name!r} cannot be written: {e.strerror}.") from None
