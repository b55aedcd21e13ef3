"""`nanovllm serve`: an OpenAI-compatible server.

Upstream: vllm/entrypoints/cli/serve.py (0.23.0)
Left out: headless and multi-node modes, gRPC, several API servers.
"""

from __future__ import annotations

import argparse

from nanovllm.engine.arg_utils import DEFAULT_MODEL, EngineArgs
from nanovllm.entrypoints.openai.cli_args import FrontendArgs
from nanovllm.exceptions import VLLMValidationError

EPILOG = """\
Examples:
  nanovllm serve                                    the model that comes with the package
  nanovllm serve ~/models/SmolLM2-135M-Instruct --port 8001 --api-key secret
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}'

Ctrl-C or SIGTERM lets running requests end, then stops.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb to the `nanovllm` command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI does",
        description="Serve a model over HTTP, with OpenAI's API.",
        usage="nanovllm serve [flags] [MODEL]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "model_tag",
        nargs="?",
        metavar="MODEL",
        help=f"checkpoint folder or known name (default: {DEFAULT_MODEL}, which comes with us)",
    )
    FrontendArgs.add_cli_args(parser.add_argument_group("server"))
    EngineArgs.add_cli_args(parser.add_argument_group("engine"))


def run(args: argparse.Namespace) -> None:
    """Serve until a signal comes.

    Raises:
        VLLMValidationError: a mistake of the user's.
    """
    if args.model_tag is not None:
        if getattr(args, "model", args.model_tag) != args.model_tag:
            raise VLLMValidationError(
                f"two models are given: {args.model_tag!r} and --model {args.model!r}."
            )
        args.model = args.model_tag
    try:
        from nanovllm.entrypoints.openai.api_server import run_server
    except ModuleNotFoundError as e:
        raise VLLMValidationError(
            f"{e.name} is missing; the server needs: pip install 'nanovllm[serve]'."
        ) from None
    run_server(EngineArgs.from_cli_args(args), FrontendArgs.from_cli_args(args))
