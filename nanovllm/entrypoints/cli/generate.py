"""`nanovllm generate`: complete prompts from the command line.

Text goes to standard output, everything else (the engine's messages, progress, the closing line) to
standard error, so that `nanovllm generate ... > story.txt` holds the story and nothing more.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from nanovllm.entrypoints.llm import LLM
    from nanovllm.inputs import PromptType
    from nanovllm.outputs import RequestOutput
    from nanovllm.sampling_params import SamplingParams

# Longer than SamplingParams' 16: whoever types a prompt wants to see more than a line.
DEFAULT_MAX_TOKENS = 128

EPILOG = """\
Examples:
  nanovllm generate "Once upon a time"
  nanovllm generate "The cat" "The dog" --temperature 0.8 --top-p 0.95 --seed 7
  nanovllm generate --chat "Tell me a story about a dog." --model ~/models/SmolLM2-135M-Instruct
  nanovllm generate --prompt-file prompts.txt --json > out.jsonl
  echo "Once upon a time" | nanovllm generate -
  nanovllm generate "Once upon a time" -v        see what every step of the engine does

The sampling flags set the fields of vLLM's SamplingParams, the engine flags those of its
EngineArgs. What is not given is taken from the model's generation_config.json, then from vLLM's
defaults.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb to the `nanovllm` command."""
    parser = subparsers.add_parser(
        "generate",
        help="complete prompts and print the text",
        description="Complete one or more prompts and print the text.",
        usage="nanovllm generate [flags] PROMPT...",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("prompts", nargs="*", metavar="PROMPT", help="text; - is standard input")
    prompts.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="one prompt a line; in a .jsonl file a line is a JSON string, a list of ids or an "
        "object with prompt or prompt_token_ids (and cache_salt, priority)",
    )
    prompts.add_argument(
        "--chat", action="store_true", help="a prompt is a user's message: apply the chat template"
    )
    prompts.add_argument("--system", metavar="TEXT", help="system message before it, with --chat")

    output = parser.add_argument_group("output")
    form = output.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object a prompt, one a line")
    form.add_argument(
        "--stream", action="store_true", help="print the text as it is made (one prompt, n = 1)"
    )
    output.add_argument(
        "-v", "--verbose", action="store_true", help="one line a step: who computed which tokens"
    )
    output.add_argument("-q", "--quiet", action="store_true", help="nothing but the text")

    _add_sampling_args(parser.add_argument_group("sampling"))
    EngineArgs.add_cli_args(parser.add_argument_group("engine"))


def _add_sampling_args(group: argparse._ArgumentGroup) -> None:
    """A flag for every field of SamplingParams; those not given leave no trace behind."""

    def add(flag: str, help: str, **kwargs: Any) -> None:
        group.add_argument(flag, help=help, default=argparse.SUPPRESS, **kwargs)

    switch = {"action": argparse.BooleanOptionalAction}
    add("--max-tokens", f"tokens to generate at most (default: {DEFAULT_MAX_TOKENS})", **_N)
    add("--min-tokens", "no end before so many tokens (default: 0)", **_N)
    add("--temperature", "0: the likeliest token; 1: as the model has it (default: 1)", **_X)
    add("--top-p", "choose among the likeliest tokens of this probability together", **_X)
    add("--top-k", "choose among the N likeliest tokens", **_N)
    add("--min-p", "choose among tokens at least X times as likely as the likeliest", **_X)
    add("--n", "samples for each prompt (default: 1)", **_N)
    add("--presence-penalty", "lower the logits of tokens generated before", **_X)
    add("--frequency-penalty", "the same, for every time they were generated", **_X)
    add("--repetition-penalty", "above 1: make tokens of prompt and output less likely", **_X)
    add("--stop", "end where this text appears; may be repeated", action="append", metavar="TEXT")
    add("--stop-token-ids", "end at these tokens: 1,2,3", type=_token_ids, metavar="IDS")
    add("--include-stop-str-in-output", "show the stop text, too", action="store_true")
    add("--ignore-eos", "go on after an end-of-sequence token", action="store_true")
    add("--logprobs", "log probabilities of the N likeliest tokens (with --json)", **_N)
    add("--prompt-logprobs", "the same for the prompt's tokens", **_N)
    add("--bad-words", "never generate this; may be repeated", action="append", metavar="TEXT")
    add("--logit-bias", "add to tokens' logits: 12=5,7=-100", type=_logit_bias, metavar="ID=X")
    add("--allowed-token-ids", "generate only these tokens: 1,2,3", type=_token_ids, metavar="IDS")
    add("--detokenize", "make text of the tokens (default: on)", **switch)
    add("--skip-special-tokens", "leave special tokens out of the text (default: on)", **switch)
    add("--spaces-between-special-tokens", "put spaces between them (default: on)", **switch)
    add("--skip-reading-prefix-cache", "compute the whole prompt even if cached", **switch)


_N: dict[str, Any] = {"type": int, "metavar": "N"}
_X: dict[str, Any] = {"type": float, "metavar": "X"}

# Flags that are fields of SamplingParams. --seed is the engine's, too.
SAMPLING_FIELDS = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_reading_prefix_cache",
)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 1,2,3") from None


def _logit_bias(text: str) -> dict[int, float]:
    try:
        pairs = (part.split("=") for part in text.split(","))
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 12=5,7=-100") from None


def run(args: argparse.Namespace) -> None:
    """Read the prompts, run the engine, print.

    Raises:
        VLLMValidationError: a mistake of the user's; those that can be found without the model come
            first.
    """
    from nanovllm.sampling_params import SamplingParams

    prompts = _read_prompts(args)
    given = {name: getattr(args, name) for name in SAMPLING_FIELDS if hasattr(args, name)}
    SamplingParams(**given)
    if args.stream and (len(prompts) > 1 or given.get("n", 1) > 1):
        raise VLLMValidationError("--stream shows one text; give one prompt and leave --n at 1.")
    if args.system is not None and not args.chat:
        raise VLLMValidationError("--system needs --chat.")
    if args.quiet:
        logging.getLogger("nanovllm").setLevel(logging.WARNING)

    from nanovllm.entrypoints.llm import LLM

    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    defaults = {"max_tokens": DEFAULT_MAX_TOKENS} | llm.model_config.get_diff_sampling_param()
    params = _params_for_each(SamplingParams(**defaults | given), len(prompts))
    if args.chat:
        prompts = [llm.preprocess_chat(_messages(prompt, args.system)) for prompt in prompts]

    start = time.perf_counter()
    if args.verbose or args.stream:
        outputs = _run_stepwise(llm, prompts, params, args)
    else:
        show_progress = len(prompts) > 1 and sys.stderr.isatty() and not args.quiet
        outputs = llm.generate(prompts, params, use_tqdm=show_progress)
    elapsed = time.perf_counter() - start

    if args.json:
        for output in outputs:
            print(json.dumps(asdict(output), ensure_ascii=False))
    elif not args.stream:
        _print_texts(outputs, show_prompt=not args.chat)
    sys.stdout.flush()
    if not args.quiet:
        print(_summary(outputs, elapsed), file=sys.stderr)


def _params_for_each(params: SamplingParams, num_prompts: int) -> list[SamplingParams]:
    """The same for every prompt but for the seed: equal seeds would make equal choices."""
    params_list = [copy(params) for _ in range(num_prompts)]
    for i, one in enumerate(params_list):
        if one.seed is not None:
            one.seed += i * one.n  # each prompt uses seeds seed, seed + 1, ... for its n samples
    return params_list


def _read_prompts(args: argparse.Namespace) -> list[PromptType]:
    """Prompts of the command line and of the file, in this order."""
    prompts: list[PromptType] = [
        sys.stdin.read().replace("\r\n", "\n").rstrip("\n") if text == "-" else text
        for text in args.prompts
    ]
    if args.prompt_file is not None:
        prompts += _read_prompt_file(Path(args.prompt_file))
    if not prompts:
        raise VLLMValidationError(
            'there is no prompt; try: nanovllm generate "Once upon a time", or --prompt-file FILE.'
        )
    return prompts


def _read_prompt_file(path: Path) -> list[PromptType]:
    """One prompt a line, empty lines left out; JSON if the name ends in .jsonl."""
    try:
        # Not splitlines(): a line may hold U+2028 and the like. utf-8-sig: a BOM is no text.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or "it is not UTF-8 text"
        raise VLLMValidationError(
            f"prompt file {str(path)!r} cannot be read: {reason}.", parameter="prompt_file"
        ) from None
    numbered = [(i, line) for i, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    prompts: list[Any] = []
    for i, line in numbered:
        try:
            prompt = json.loads(line)
        except (ValueError, RecursionError) as e:  # ValueError: also a number of 5,000 digits
            raise VLLMValidationError(
                f"line {i} of {str(path)!r} is not JSON: {e}.", parameter="prompt_file"
            ) from None
        if not isinstance(prompt, (str, list, dict)):
            raise VLLMValidationError(
                f"line {i} of {str(path)!r} must be a string, a list of token ids or an object, "
                f"got {line.strip()}.",
                parameter="prompt_file",
            )
        prompts.append(prompt)
    return prompts


def _messages(prompt: PromptType, system: str | None) -> list[Any]:
    """A conversation of one message by the user."""
    if not isinstance(prompt, str):
        raise VLLMValidationError("--chat needs prompts that are text.", parameter="chat")
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": prompt}]


def _run_stepwise(
    llm: LLM, prompts: list[PromptType], params: list[SamplingParams], args: argparse.Namespace
) -> list[RequestOutput]:
    """LLM.generate's loop, with something to see at every step."""
    from nanovllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    kind = RequestOutputKind.CUMULATIVE if args.stream else RequestOutputKind.FINAL_ONLY
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        one.output_kind = kind
        engine.add_request(str(i), prompt, one)
    steps = _StepLines(llm) if args.verbose else None
    num_shown = 0
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        if steps is not None:
            steps.before_step()
        outputs = engine.step()
        if steps is not None:
            steps.after_step()
        for output in outputs:
            if args.stream:
                text = output.outputs[0].text
                print(text[num_shown:], end="", flush=True)
                num_shown = len(text)
            if output.finished:
                finished[output.request_id] = output
    if args.stream:
        print()
    return [finished[str(i)] for i in range(len(prompts))]


class _StepLines:
    """One line a step on standard error: how far each request has come, and the blocks they hold.

    A request's `3->7` says that its tokens 3 to 6 are in the KV cache now and were not before:
    computed, or for a new request found there. `9->0` is a preemption.
    """

    def __init__(self, llm: LLM) -> None:
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._step = 0
        print("step running waiting KV-blocks  tokens in the cache, by request", file=sys.stderr)

    def before_step(self) -> None:
        requests = self._scheduler.requests.values()
        self._before = [(request, request.num_computed_tokens) for request in requests]

    def after_step(self) -> None:
        self._step += 1
        scheduler = self._scheduler
        moved = "  ".join(
            f"{request.request_id}:{before}->{request.num_computed_tokens}"
            for request, before in self._before
            if request.num_computed_tokens != before
        )
        manager = scheduler.kv_cache_manager
        num_held = round(manager.usage * (manager.block_pool.num_gpu_blocks - 1))
        print(
            f"{self._step:4} {len(scheduler.running):7} {len(scheduler.waiting):7} {num_held:9}  "
            f"{moved}",
            file=sys.stderr,
        )


def _print_texts(outputs: list[RequestOutput], show_prompt: bool) -> None:
    """Prompt (dimmed on a terminal) and text; samples and prompts set apart by an empty line."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    separate = False
    for output in outputs:
        for sample in output.outputs:
            if separate:
                print()
            separate = True
            prompt, text = output.prompt or "", sample.text
            if output.prompt is None and not text:
                # Neither prompt nor output has text (--skip-tokenizer-init, --no-detokenize).
                text = " ".join(map(str, sample.token_ids))
            if not show_prompt:
                prompt = ""
            if console.is_terminal:
                console.print(Text(prompt, style="dim"), Text(text), sep="", soft_wrap=True)
            else:
                print(prompt + text)


def _summary(outputs: list[RequestOutput], elapsed: float) -> str:
    """The closing line: tokens, speed, time to the first token, why it ended."""
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached_tokens = sum(output.num_cached_tokens or 0 for output in outputs)
    samples = [sample for output in outputs for sample in output.outputs]
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    latencies = [output.metrics.first_token_latency for output in outputs if output.metrics]
    reasons = sorted({str(sample.finish_reason) for sample in samples})
    first_token = ""
    if latencies:
        mean = "" if len(latencies) == 1 else " on average"
        first_token = f", first token after {sum(latencies) / len(latencies):.3f} s{mean}"
    return (
        f"[{num_prompt_tokens} prompt tokens ({num_cached_tokens} cached), {num_tokens} generated "
        f"in {elapsed:.2f} s: {num_tokens / max(elapsed, 1e-9):.1f} tok/s{first_token}; "
        f"finish reason: {', '.join(reasons)}]"
    )
