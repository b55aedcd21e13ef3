"""`nanovllm chat`: what is sent, what is shown, what is remembered."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.entrypoints.cli import chat
from nanovllm.entrypoints.cli.chat import Chat
from nanovllm.entrypoints.cli.main import main
from nanovllm.exceptions import VLLMValidationError
from tests.fake_server import (
    BREAK,
    DONE,
    FakeServer,
    Request,
    Response,
    chat_chunk,
    event,
    json_response,
    stream,
    usage,
)

ROOT = Path(__file__).resolve().parents[2]


class Script:
    """A backend that answers from a list; what it was sent is kept."""

    name = "script"

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.sent: list[list[Any]] = []
        self.closed = 0

    def stream(self, messages: list[Any]) -> Iterator[str]:
        self.sent.append(messages)
        try:
            for piece in self.answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.closed += 1

    def usage(self) -> str:
        return "5 prompt tokens, 2 generated"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "be brief"}


# ---- the history ----


def test_every_turn_sends_all_that_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(["Hel", "lo"], ["Fine"])
    talk = Chat(script, "be brief")
    assert not talk.handle("hi")
    assert not talk.handle("how are you?")
    assert script.sent == [
        [SYSTEM, user("hi")],
        [SYSTEM, user("hi"), assistant("Hello"), user("how are you?")],
    ]
    assert capsys.readouterr().out == "Hello\nFine\n"


def test_reset_forgets_all_but_the_system_prompt() -> None:
    script = Script(["a"], ["b"])
    talk = Chat(script, "be brief")
    talk.handle("one")
    talk.handle("  /reset ")
    talk.handle("two")
    assert script.sent[1] == [SYSTEM, user("two")]
    assert talk.messages == [SYSTEM, user("two"), assistant("b")]


def test_exit_ends_it_and_nothing_is_sent_for_commands_and_empty_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Script()
    talk = Chat(script)
    assert talk.handle("/exit")
    assert talk.handle("/quit")
    for line in ("", "   ", "/help", "/rest"):
        assert not talk.handle(line)
    assert script.sent == []
    captured = capsys.readouterr()
    assert "/reset" in captured.err
    assert "there is no command /rest" in captured.err
    assert captured.out == ""


def test_a_path_is_no_command() -> None:
    script = Script(["ok"])
    Chat(script).handle("/usr/bin is what?")
    assert script.sent == [[user("/usr/bin is what?")]]


def test_a_message_that_cannot_be_answered_leaves_no_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Script(["fine"], ["half", VLLMValidationError("too long")], ["fine again"])
    talk = Chat(script)
    talk.handle("one")
    with pytest.raises(VLLMValidationError):
        talk.handle("two")
    talk.handle("three")
    assert script.sent[2] == [user("one"), assistant("fine"), user("three")]
    assert capsys.readouterr().out == "fine\nhalf\nfine again\n"


def test_an_interrupted_answer_stays_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    script = Script(["Once ", "upon", KeyboardInterrupt()], ["ok"])
    talk = Chat(script)
    talk.handle("tell")
    talk.handle("go on")
    assert script.sent[1] == [user("tell"), assistant("Once upon"), user("go on")]
    assert script.closed == 2


# ---- a server ----


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lines for standard input, which is no terminal."""

    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))

    return give


async def echo(request: Request) -> Response:
    """Answers with the last message, in capitals; lists two models."""
    if request.method == "GET":
        assert request.path == "/v1/models"
        return json_response({"data": [{"id": "parrot"}, {"id": "other"}]})
    assert request.path == "/v1/chat/completions"
    words = request.json()["messages"][-1]["content"].upper().split(" ")
    pieces = [chat_chunk(word if i == 0 else " " + word) for i, word in enumerate(words)]
    return stream(chat_chunk("", role="assistant"), *pieces, usage(4, len(words)), DONE)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_lines_of_a_pipe_are_messages_and_answers_stand_alone_on_standard_output(
    suffix: str, stdin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin("hi there\r\n\nwhat é?\n/reset\nagain\n/exit\nnever sent\n")
    with FakeServer(echo) as server:
        code = main(["chat", "--url", server.url + suffix, "--system-prompt", "be brief"])
        bodies = [request.json() for request in server.requests if request.body]
    assert code == 0
    assert capsys.readouterr().out == "HI THERE\nWHAT É?\nAGAIN\n"
    assert bodies[0]["model"] == "parrot"
    assert bodies[0]["stream"] is True
    assert [body["messages"] for body in bodies] == [
        [SYSTEM, user("hi there")],
        [SYSTEM, user("hi there"), assistant("HI THERE"), user("what é?")],
        [SYSTEM, user("again")],
    ]


def test_flags_become_fields_of_the_request(stdin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    stdin("hi\n")
    flags = ("--temperature", "0", "--max-tokens", "7", "--stop", "x", "--stop", "y", "--seed", "3")
    with FakeServer(echo) as server:
        assert main(["chat", "--url", server.url, "--model-name", "mine", *flags]) == 0
        (request,) = server.requests  # the model is known: it is not asked for
        assert main(["chat", "--url", server.url, "--api-key", "given", "-q", "hi"]) == 0
        second = server.requests[-1]
    body = request.json()
    assert body["model"] == "mine"
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0, 7, 3)
    assert body["stop"] == ["x", "y"]
    assert "top_p" not in body
    assert request.headers["authorization"] == "Bearer from-environment"
    assert second.headers["authorization"] == "Bearer given"


def test_quick_answers_one_message_and_reads_no_input(
    stdin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin("not read\n")
    with FakeServer(echo) as server:
        assert main(["chat", "--url", server.url, "-q", "one thing"]) == 0
    assert capsys.readouterr().out == "ONE THING\n"


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            json_response({"error": {"message": "prompt too long"}}, 400),
            "HTTP 400: prompt too long",
        ),
        (json_response({"error": {"message": "bad key"}}, 401), "HTTP 401: bad key"),
        (stream(chat_chunk("ab"), event({"error": {"message": "it died"}})), "broke off: it died"),
        (stream(chat_chunk("ab"), BREAK), "cannot be reached"),
        (stream(event([1])), "no chat completion chunk"),
        (stream(b"data: {\n\n"), "no chat completion chunk"),
    ],
)
def test_a_server_that_fails_is_quoted_and_a_pipe_ends_there(
    response: Response, message: str, stdin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async def handler(request: Request) -> Response:
        return response

    stdin("hi\nagain\n")
    with FakeServer(handler) as server:
        assert main(["chat", "--url", server.url, "--model-name", "m"]) == 2
        assert len(server.requests) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out in ("", "ab\n")


def test_a_server_without_models_or_without_a_server_is_named(
    stdin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async def handler(request: Request) -> Response:
        return json_response({"data": []})

    with FakeServer(handler) as server:
        assert main(["chat", "--url", server.url]) == 2
        assert "lists no model" in capsys.readouterr().err
    assert main(["chat", "--url", server.url]) == 2
    assert "cannot be reached" in capsys.readouterr().err
    assert main(["chat", "--url", "no address"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_flags_of_a_server_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--model-name", "x"]) == 2
    assert "--model-name needs --url" in capsys.readouterr().err
    assert main(["chat", "--temperature", "-1"]) == 2
    assert "temperature" in capsys.readouterr().err


# ---- an engine in this process ----

LOCAL = ("--device", "cpu", "--num-gpu-blocks-override", "70", "--temperature", "0")


def test_the_local_engine_answers_as_llm_chat_does(
    stdin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from nanovllm import LLM, SamplingParams

    llm = LLM(device="cpu", num_gpu_blocks_override=70)
    params = SamplingParams(temperature=0, max_tokens=12)
    conversation: list[Any] = [user("Tell me a story.")]
    expected = []
    for message in ("And then?", ""):
        text = llm.chat(conversation, params, use_tqdm=False)[0].outputs[0].text
        expected.append(text)
        conversation += [assistant(text), user(message)]

    stdin("Tell me a story.\nAnd then?\n/reset\nTell me a story.\n")
    assert main(["chat", *LOCAL, "--max-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert out == f"{expected[0]}\n{expected[1]}\n{expected[0]}\n"
    assert expected[0].strip()


@pytest.fixture(scope="module")
def local() -> chat.LocalBackend:
    from nanovllm import EngineArgs

    args = EngineArgs(device="cpu", num_gpu_blocks_override=70)
    return chat.LocalBackend(args, {"temperature": 0.0, "max_tokens": 40})


def test_the_text_comes_in_pieces_and_the_prefix_cache_serves_the_second_turn(
    local: chat.LocalBackend,
) -> None:
    question = "Tell me a long story about a dog, a cat and a bird who went to the park to play."
    pieces = list(local.stream([user(question)]))
    assert len(pieces) > 5
    assert "(0 cached)" in local.usage()
    list(local.stream([user(question), assistant("".join(pieces)), user("Go on.")]))
    prompt, cached = int(local.usage().split()[0]), int(local.usage().split("(")[1].split()[0])
    assert 16 <= cached < prompt


def test_an_answer_that_is_given_up_leaves_nothing_in_the_engine(
    local: chat.LocalBackend,
) -> None:
    answer = local.stream([user("Tell me a story.")])
    next(answer)
    engine = local._llm.llm_engine
    assert engine.has_unfinished_requests()
    answer.close()  # type: ignore[attr-defined]
    assert not engine.has_unfinished_requests()
    scheduler = engine.engine_core.engine_core.scheduler
    assert not scheduler.requests
    assert scheduler.kv_cache_manager.usage == 0
    assert list(local.stream([user("Tell me a story.")]))


def test_a_history_that_is_too_long_is_refused_and_can_be_reset(
    local: chat.LocalBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Chat(local)
    with pytest.raises(VLLMValidationError, match="1024"):
        talk.handle("word " * 1100)
    assert talk.messages == []
    talk.handle("Hello")
    assert len(talk.messages) == 2


# ---- a terminal ----


class Terminal:
    """`nanovllm chat` on a pseudo-terminal."""

    def __init__(self, *args: str) -> None:
        import pty

        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nanovllm", "chat", *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def expect(self, text: str, timeout: float = 60.0) -> None:
        """Read until `text` comes after what was expected before."""
        deadline = time.monotonic() + timeout
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not come, but {self.seen!r}"
            if select.select([self.master], [], [], left)[0]:
                try:
                    data = os.read(self.master, 4096)
                except OSError:  # the other end has closed
                    data = b""
                assert data, f"{text!r} did not come, but {self.seen!r}"
                self.seen += data.decode()
        self.seen = self.seen.split(text, 1)[1]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> int:
        self.process.wait(60)
        os.close(self.master)
        return self.process.returncode


def test_in_a_terminal_one_talks_and_mistakes_do_not_end_it() -> None:
    turn = iter(range(10))

    async def handler(request: Request) -> Response:
        if request.path.endswith("/completions") and next(turn) == 1:
            return json_response({"error": {"message": "too long"}}, 400)
        return await echo(request)

    with FakeServer(handler) as server:
        terminal = Terminal("--url", server.url)
        terminal.expect("parrot: send a message, or /help")
        terminal.expect("> ")
        terminal.type("hello\n")
        terminal.expect("HELLO")
        terminal.expect("4 prompt tokens, 1 generated in")
        terminal.expect("> ")
        terminal.type("refused\n")
        terminal.expect("HTTP 400: too long")
        terminal.expect("> ")
        terminal.type("more\n")
        terminal.expect("MORE")
        terminal.type("/exit\n")
        assert terminal.close() == 0
        last = server.requests[-1].json()["messages"]
    assert last == [user("hello"), assistant("HELLO"), user("more")]


def test_ctrl_c_ends_an_answer_then_the_chat() -> None:
    async def handler(request: Request) -> Response:
        if request.method == "GET":
            return await echo(request)
        if len(request.json()["messages"]) > 1:
            return await echo(request)
        return stream(chat_chunk("Once upon"), 60.0, DONE)

    with FakeServer(handler) as server:
        terminal = Terminal("--url", server.url)
        terminal.expect("> ")
        terminal.type("story\n")
        terminal.expect("Once upon")
        terminal.process.send_signal(signal.SIGINT)
        terminal.expect("> ")
        terminal.type("next\n")
        terminal.expect("NEXT")
        terminal.expect("> ")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.close() == 0
        last = server.requests[-1].json()["messages"]
    assert last == [user("story"), assistant("Once upon"), user("next")]
