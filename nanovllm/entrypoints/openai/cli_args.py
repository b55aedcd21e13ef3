"""Flags of the server itself; those of the engine are EngineArgs'.

Upstream: vllm/entrypoints/openai/cli_args.py (0.23.0)
Left out: TLS, CORS, root paths, middleware of the user's own, tools and reasoning. Ours:
`max_num_waiting` and `max_request_size`.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass, field, fields

from nanovllm.exceptions import VLLMValidationError

MIB = 1 << 20


@dataclass
class FrontendArgs:
    """How the server listens, whom it answers and what it logs."""

    host: str = "127.0.0.1"
    port: int = 8000
    # One of them must come as `Authorization: Bearer KEY`; none: everybody is answered.
    api_key: list[str] = field(default_factory=list)
    # Requests beyond the running ones (max_num_seqs) that may wait; None: no limit. (Each prompt,
    # and each of its n samples, counts.)
    max_num_waiting: int | None = None
    # Largest body, in bytes.
    max_request_size: int = 8 * MIB
    # A file or Jinja text; None: the tokenizer's own.
    chat_template: str | None = None
    # Whether a request may bring its own template. A template is a program: it can loop for long.
    trust_request_chat_template: bool = False
    # Role of the messages that the model writes.
    response_role: str = "assistant"
    # usage.prompt_tokens_details, with the tokens that the prefix cache had.
    enable_prompt_tokens_details: bool = False
    # Usage at the end of every stream, asked for or not.
    enable_force_include_usage: bool = False
    # Log every request's id, parameters and prompt.
    enable_log_requests: bool = False
    disable_uvicorn_access_log: bool = False
    uvicorn_log_level: str = "info"
    # Seconds that running requests get to end after SIGTERM or Ctrl-C.
    shutdown_timeout: int = 30
    # Where the engine runs: a thread of this process, or a process of its own.
    engine_client: str = "inproc"

    def check(self) -> None:
        """
        Raises:
            VLLMValidationError: a number is out of range.
        """
        limits = {
            "port": (0, 65535),
            "max_num_waiting": (0, math.inf),
            "max_request_size": (1, math.inf),
            "shutdown_timeout": (0, math.inf),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                bounds = f"at least {least}" if most == math.inf else f"in [{least}, {most}]"
                raise VLLMValidationError(
                    f"{name} must be {bounds}, got {value}.", parameter=name, value=value
                )

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
        """A flag for every field. Flags not given leave no trace in the namespace."""

        def add(flag: str, help: str, **kwargs: object) -> None:
            parser.add_argument(flag, help=help, default=argparse.SUPPRESS, **kwargs)  # type: ignore[arg-type]

        add("--host", "address to listen on (default: 127.0.0.1)")
        add("--port", "port to listen on; 0: any free one (default: 8000)", type=int, metavar="N")
        add(
            "--api-key",
            "answer only requests that bear this key; may be repeated (default: $NANOVLLM_API_KEY)",
            action="append",
            metavar="KEY",
        )
        add(
            "--max-num-waiting",
            "requests that may wait beyond the running ones; more are refused with 429 "
            "(default: no limit)",
            type=int,
            metavar="N",
        )
        add(
            "--max-request-size",
            f"largest body of a request in bytes (default: {8 * MIB})",
            type=int,
            metavar="N",
        )
        add("--chat-template", "Jinja, or a file of it (default: the model's)", metavar="FILE")
        add(
            "--trust-request-chat-template",
            "let requests bring chat templates, which are programs",
            action="store_true",
        )
        add("--response-role", "role of the model's messages (default: assistant)", metavar="NAME")
        add(
            "--enable-prompt-tokens-details",
            "tell in usage how many prompt tokens were cached",
            action="store_true",
        )
        add(
            "--enable-force-include-usage",
            "end every stream with its usage",
            action="store_true",
        )
        add("--enable-log-requests", "log parameters and prompts", action="store_true")
        add("--disable-uvicorn-access-log", "no line for every request", action="store_true")
        add(
            "--uvicorn-log-level",
            "of the HTTP server's own messages (default: info)",
            choices=("critical", "error", "warning", "info", "debug", "trace"),
        )
        add(
            "--shutdown-timeout",
            "seconds that running requests get to end after SIGTERM (default: 30)",
            type=int,
            metavar="N",
        )
        add(
            "--engine-client",
            "engine in a thread of this process, or in a process of its own (default: inproc)",
            choices=("inproc", "mp"),
        )

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> FrontendArgs:
        """FrontendArgs from a namespace that `add_cli_args` had filled."""
        names = [f.name for f in fields(cls)]
        given = {name: getattr(args, name) for name in names if hasattr(args, name)}
        if key := os.environ.get("NANOVLLM_API_KEY"):
            given.setdefault("api_key", [key])
        return cls(**given)
