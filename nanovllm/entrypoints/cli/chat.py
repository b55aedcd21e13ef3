"""`nanovllm chat`: talk with a model in the terminal.

    history  [system] user assistant user assistant ...  user
                                                            -> Backend.stream -> text, as it comes
    Every turn sends the whole history again; the prefix cache is what makes that cheap.

The model runs in this process, or behind an OpenAI-compatible server (--url). When standard input
is no terminal, every line of it is a message and standard output holds the answers alone.

Upstream: ChatCommand in vllm/entrypoints/cli/openai.py (0.23.0), which needs a server.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.entrypoints.chat_utils import ChatCompletionMessageParam
from nanovllm.exceptions import VLLMValidationError

PROMPT = "> "
COMMANDS = """\
  /reset   begin anew: forget what was said, keep the system prompt
  /exit    leave (or Ctrl-D)
  /help    this
Ctrl-C ends an answer; what there is of it stays in the history."""

EPILOG = (
    """\
Examples:
  nanovllm chat --model ~/models/SmolLM2-135M-Instruct --system-prompt "You are brief."
  nanovllm chat --url http://127.0.0.1:8000
  echo "Tell me a story about a dog." | nanovllm chat

In the chat:
"""
    + COMMANDS
)

# Fields of SamplingParams, and of a chat completion request, that have a flag here.
SAMPLING_FIELDS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "tokens of an answer at most (default: as many as fit)"),
    "temperature": (float, "0: the likeliest token; 1: as the model has it"),
    "top_p": (float, "choose among the likeliest tokens of this probability together"),
    "top_k": (int, "choose among the N likeliest tokens"),
    "min_p": (float, "choose among tokens at least X times as likely as the likeliest"),
    "presence_penalty": (float, "lower the logits of tokens generated before"),
    "frequency_penalty": (float, "the same, for every time they were generated"),
    "repetition_penalty": (float, "above 1: make tokens of prompt and answer less likely"),
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb to the `nanovllm` command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model, here or behind an OpenAI-compatible server.",
        usage="nanovllm chat [flags]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    chat = parser.add_argument_group("conversation")
    chat.add_argument("--system-prompt", metavar="TEXT", help="message that goes before all others")
    chat.add_argument("-q", "--quick", metavar="MESSAGE", help="answer this and end")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url", metavar="URL", help="a server's address; engine flags are idle then"
    )
    server.add_argument("--model-name", metavar="NAME", help="(default: the first it lists)")
    server.add_argument("--api-key", metavar="KEY", help="(default: $OPENAI_API_KEY)")
    sampling = parser.add_argument_group("sampling")
    for name, (kind, text) in SAMPLING_FIELDS.items():
        flag = "--" + name.replace("_", "-")
        metavar = "N" if kind is int else "X"
        sampling.add_argument(flag, type=kind, metavar=metavar, help=text)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end where this appears")
    EngineArgs.add_cli_args(parser.add_argument_group("engine"))


def run(args: argparse.Namespace) -> None:
    """Hold the conversation.

    Raises:
        VLLMValidationError: the model or the server cannot be used; or a message cannot be
            answered and nobody is there to send another (standard input is no terminal).
    """
    backend = _make_backend(args)
    chat = Chat(backend, args.system_prompt)
    if args.quick is not None:
        chat.answer(args.quick)
    elif sys.stdin.isatty():
        _converse(chat)
    else:
        for line in sys.stdin:
            if chat.handle(line.rstrip("\r\n")):
                break


def _converse(chat: Chat) -> None:
    """Ask for messages until /exit, Ctrl-D or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history in input()
    print(f"{chat.backend.name}: send a message, or /help", file=sys.stderr)
    while True:
        try:
            message = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            print()
            return
        try:
            if chat.handle(message):
                return
        except VLLMValidationError as e:
            print(f"error: {' '.join(str(e).split())}", file=sys.stderr)


class Backend(Protocol):
    """Whoever answers."""

    name: str

    def stream(self, messages: list[ChatCompletionMessageParam]) -> Iterator[str]:
        """Yield the answer in pieces; closing the iterator ends it.

        Raises:
            VLLMValidationError: there is no answer, or no more of it.
        """

    def usage(self) -> str:
        """Token counts of the last answer, in words."""


class Chat:
    """The history, and what a line of input does to it.

    A message that could not be answered leaves no trace: the history is as it was before it.
    """

    def __init__(self, backend: Backend, system_prompt: str | None = None) -> None:
        self.backend = backend
        self._system: list[ChatCompletionMessageParam] = []
        if system_prompt is not None:
            self._system = [{"role": "system", "content": system_prompt}]
        self.messages = list(self._system)

    def handle(self, line: str) -> bool:
        """A message or a command; an empty line is neither.

        Returns:
            True after /exit.
        """
        command = line.strip()
        if command in ("/exit", "/quit"):
            return True
        if command == "/reset":
            self.messages = list(self._system)
        elif command == "/help":
            print(COMMANDS, file=sys.stderr)
        elif command.startswith("/") and command[1:].isalpha():
            print(f"there is no command {command}; see /help", file=sys.stderr)
        elif command:
            self.answer(line)
        return False

    def answer(self, message: str) -> None:
        """Print the answer as it comes and keep both in the history."""
        question: ChatCompletionMessageParam = {"role": "user", "content": message}
        pieces: list[str] = []
        start = time.perf_counter()
        first_token = 0.0
        stream = self.backend.stream([*self.messages, question])
        try:
            for piece in stream:
                first_token = first_token or time.perf_counter() - start
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            stream.close()  # type: ignore[attr-defined]  # a generator: the request is dropped
        except VLLMValidationError:
            if pieces:
                print()
            raise
        print(flush=True)
        answer: ChatCompletionMessageParam = {"role": "assistant", "content": "".join(pieces)}
        self.messages += [question, answer]
        if sys.stderr.isatty():
            elapsed = time.perf_counter() - start
            usage = self.backend.usage()
            print(
                f"\x1b[2m[{usage} in {elapsed:.2f} s, first text after {first_token:.3f} s]\x1b[0m",
                file=sys.stderr,
            )


def _make_backend(args: argparse.Namespace) -> Backend:
    given = {name: getattr(args, name) for name in [*SAMPLING_FIELDS, "stop"]}
    sampling = {name: value for name, value in given.items() if value is not None}
    if hasattr(args, "seed"):
        sampling["seed"] = args.seed
    if args.url is not None:
        return ServerBackend(args.url, args.model_name, args.api_key, sampling)
    for name in ("model_name", "api_key"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise VLLMValidationError(f"{flag} needs --url.", parameter=name)
    return LocalBackend(EngineArgs.from_cli_args(args), sampling)


class LocalBackend:
    """An engine in this process."""

    def __init__(self, engine_args: EngineArgs, sampling: dict[str, Any]) -> None:
        """Load the model; `sampling` are fields of SamplingParams.

        Raises:
            VLLMValidationError: an argument cannot be used.
        """
        from nanovllm.sampling_params import RequestOutputKind, SamplingParams

        SamplingParams(**sampling)  # complains before the model is loaded
        from nanovllm.entrypoints.llm import LLM

        self._llm = LLM.from_engine_args(engine_args)
        defaults = {"max_tokens": None} | self._llm.model_config.get_diff_sampling_param()
        self._params = SamplingParams(**(defaults | sampling))
        self._params.output_kind = RequestOutputKind.DELTA
        self._request_ids = (f"chat-{i}" for i in itertools.count())
        self.name = str(self._llm.model_config.served_model_name)
        self._counts = (0, 0, 0)

    def stream(self, messages: list[ChatCompletionMessageParam]) -> Iterator[str]:
        engine = self._llm.llm_engine
        request_id = next(self._request_ids)
        engine.add_request(request_id, self._llm.preprocess_chat(messages), self._params)
        num_generated = 0
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    num_generated += len(output.outputs[0].token_ids)
                    self._counts = (
                        len(output.prompt_token_ids),
                        output.num_cached_tokens or 0,
                        num_generated,
                    )
                    if output.outputs[0].text:
                        yield output.outputs[0].text
        finally:
            engine.abort_request([request_id])

    def usage(self) -> str:
        prompt, cached, generated = self._counts
        return f"{prompt} prompt tokens ({cached} cached), {generated} generated"


class ServerBackend:
    """A server that speaks OpenAI's protocol, nanovllm's or another."""

    def __init__(
        self, url: str, model_name: str | None, api_key: str | None, sampling: dict[str, Any]
    ) -> None:
        """Ask the server for its model if `model_name` is None.

        Args:
            url: with or without /v1 at the end.
            api_key: None: that of $OPENAI_API_KEY, if there is one.
            sampling: fields of the request body.

        Raises:
            VLLMValidationError: the server cannot be reached or lists no model.
        """
        import httpx

        from nanovllm.benchmarks.lib.endpoint_request_func import make_headers

        self._base_url = url.rstrip("/").removesuffix("/v1") + "/v1"
        bearer = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(headers=make_headers(bearer), timeout=httpx.Timeout(600.0))
        self._sampling = sampling
        self._usage: dict[str, Any] = {}
        self.name = model_name or self._first_model()

    def _first_model(self) -> str:
        url = f"{self._base_url}/models"
        try:
            return str(self._request("GET", url)["data"][0]["id"])
        except (LookupError, TypeError) as e:
            raise VLLMValidationError(f"{url} lists no model; give --model-name.") from e

    def _request(self, method: str, url: str) -> Any:
        import httpx

        try:
            response = self._client.request(method, url)
            _raise_for_status(url, response.status_code, response.content)
            return response.json()
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise _unreachable(url, e) from e
        except ValueError as e:
            if isinstance(e, VLLMValidationError):
                raise
            raise VLLMValidationError(f"{url} does not answer with JSON: {e}") from e

    def stream(self, messages: list[ChatCompletionMessageParam]) -> Iterator[str]:
        import httpx

        from nanovllm.benchmarks.lib.endpoint_request_func import StreamedResponseHandler

        url = f"{self._base_url}/chat/completions"
        body = {"model": self.name, "messages": messages, "stream": True} | self._sampling
        body["stream_options"] = {"include_usage": True}
        handler = StreamedResponseHandler()
        try:
            with self._client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    _raise_for_status(url, response.status_code, response.read())
                for chunk in response.iter_bytes():
                    for message in handler.add_chunk(chunk):
                        yield from self._text_of(url, message)
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise _unreachable(url, e) from e

    def _text_of(self, url: str, message: str) -> Iterator[str]:
        import json

        if message == "[DONE]":
            return
        try:
            data = json.loads(message)
            error, choices = data.get("error"), data.get("choices")
            text = choices[0].get("delta", {}).get("content") if choices else None
        except (ValueError, AttributeError, LookupError, TypeError) as e:
            raise VLLMValidationError(f"{url} sent no chat completion chunk: {message}") from e
        if error:
            what = error.get("message", error) if isinstance(error, dict) else error
            raise VLLMValidationError(f"the server broke off: {what}")
        self._usage = data.get("usage") or self._usage
        if text:
            yield text

    def usage(self) -> str:
        prompt, generated = (
            self._usage.get(name, "?") for name in ("prompt_tokens", "completion_tokens")
        )
        return f"{prompt} prompt tokens, {generated} generated"


def _raise_for_status(url: str, status_code: int, body: bytes) -> None:
    from nanovllm.benchmarks.lib.endpoint_request_func import describe_refusal

    if status_code != 200:
        raise VLLMValidationError(f"{url} refuses: {describe_refusal(status_code, body)}")


def _unreachable(url: str, error: Exception) -> VLLMValidationError:
    reason = str(error) or type(error).__name__
    return VLLMValidationError(f"{url} cannot be reached: {reason}", parameter="url", value=url)
