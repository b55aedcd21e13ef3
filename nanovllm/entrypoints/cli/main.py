"""The `nanovllm` command.

Every verb is a module of this package with `add_parser(subparsers)`; nothing heavy is imported
before a verb runs, so that `--help` is instant.

Upstream: vllm/entrypoints/cli/main.py (0.23.0)
Left out: upstream's other benchmarks, run-batch, collect-env, complete, launch.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from nanovllm import __version__
from nanovllm.entrypoints.cli import (
    bench,
    chat,
    estimate,
    generate,
    serve,
    tour,
    trace,
    walkthrough,
)
from nanovllm.exceptions import VLLMValidationError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 128 + 2  # SIGINT
EXIT_BROKEN_PIPE = 128 + 13  # SIGPIPE

EPILOG = """\
Start here:
  nanovllm generate "Once upon a time"      let the model that comes with it tell a story
  nanovllm generate --help                  all that can be set
  nanovllm chat                             talk with it
  nanovllm serve                            answer HTTP requests as OpenAI does
"""


class ArgumentParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence instead of printing all flags before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="nanovllm",
        description="Run language models with an engine built as vLLM V1 is, small enough to read.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    generate.add_parser(subparsers)
    chat.add_parser(subparsers)
    serve.add_parser(subparsers)
    bench.add_parser(subparsers)
    estimate.add_parser(subparsers)
    tour.add_parser(subparsers)
    trace.add_parser(subparsers)
    walkthrough.add_parser(subparsers)
    return parser


def _make_streams_usable() -> None:
    """A stream that the caller has closed is None; one in ASCII cannot print every text."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for the whole run
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 2 after a user's mistake, which is named in one line on standard error; 130 after Ctrl-C;
        141 when the reader of our output has gone. Any other error is the engine's and keeps its
        traceback.
    """
    _make_streams_usable()
    parser = make_parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    try:
        args.run(args)
        sys.stdout.flush()
        return 0
    except VLLMValidationError as e:
        message = " ".join(str(e).split())
        print(f"nanovllm: error: {message}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("nanovllm: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python would flush standard output at exit and complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
