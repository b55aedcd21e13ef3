"""`nanovllm trace`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm.engine.arg_utils import EngineArgs
from nanovllm.entrypoints.cli.main import main, make_parser
from nanovllm.entrypoints.cli.trace import SMALL_ENGINE, _engine_args


@pytest.fixture
def command(trace_model: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run it on the tiny checkpoint: (exit code, stdout, stderr)."""

    def call(*args: str, model: bool = True) -> tuple[int, str, str]:
        flags = ["--model", str(trace_model), "--device", "cpu"] if model else []
        try:
            code = main(["trace", *flags, *args])
        except SystemExit as e:  # argparse
            code = int(e.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


GREEDY = ("--temperature", "0", "--ignore-eos", "--max-tokens", "4")


def test_every_step_is_shown_and_a_summary(command: Any) -> None:
    code, out, _ = command("once upon a time", "once upon a hill", *GREEDY, "--arrive", "0,2")
    assert code == 0
    steps = [line.split()[1] for line in out.splitlines() if line.startswith("step ")]
    assert steps == [str(i) for i in range(1, 7)]
    header = " ".join(out.split("How to")[0].split())
    assert "31 blocks of 4 tokens, at most 16 tokens and 4 requests a step" in header
    assert "12 from the cache" in out
    assert "[length]" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_narrow_terminal_gets_a_narrow_grid(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = command("once upon a time", *GREEDY)
    assert max(map(len, out.splitlines())) <= 80
    pool = out.split("step 2")[1].split("blocks  ")[1].split("free queue: ")[0].splitlines()[1:-1]
    assert [int(line.split()[0]) for line in pool] == [0, 8, 16, 24]


def test_a_range_of_steps(command: Any) -> None:
    _, out, _ = command("once upon a time", *GREEDY, "--steps", "2-3")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("step ")] == ["2", "3"]


def test_the_watched_requests_choices(command: Any) -> None:
    flags = ("--temperature", "0.7", "--top-k", "5", "--max-tokens", "3", "--ignore-eos")
    _, out, _ = command("ab", "cd", *flags, "--watch", "1", "--watch-step", "2")
    assert out.count("sampling") == 1
    assert "how B" in out
    assert "k = 5" in out


def test_quiet_writes_files_only_and_a_file_can_be_shown_again(
    command: Any, tmp_path: Path
) -> None:
    paths = {name: tmp_path / f"trace.{name}" for name in ("jsonl", "perfetto", "html")}
    files = [text for name, path in paths.items() for text in (f"--{name}", str(path))]
    assert command("once upon a time", *GREEDY, "--quiet", *files) == (0, "", "")
    lines = paths["jsonl"].read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["engine"]["block_size"] == 4
    assert [json.loads(line)["step"] for line in lines[1:]] == [1, 2, 3, 4]
    assert json.loads(paths["perfetto"].read_text(encoding="utf-8"))["traceEvents"]
    assert paths["html"].read_text(encoding="utf-8").startswith("<!doctype html>")

    _, live, _ = command("once upon a time", *GREEDY)
    code, again, err = command("--from", str(paths["jsonl"]), model=False)
    assert (code, err) == (0, "")
    without_times = [
        line for line in again.splitlines() if "ms" not in line and "step 1" not in line
    ]
    assert without_times == [
        line for line in live.splitlines() if "ms" not in line and "step 1" not in line
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "there is no prompt; try: nanovllm trace"),
        (("a", "--arrive", "0,1"), "arrivals must be one number from 0 for each of the 1 prompts"),
        (("a", "--arrive", "x"), "'x' is not of the form 0,0,3"),
        (("a", "--steps", "5-2"), "'5-2' names no step"),
        (("a", "--watch", "Q"), "there is no request 'Q' to watch"),
        (("a", "--top-p", "7"), "top_p"),
        (("--from", "/nowhere.jsonl"), "cannot be read: No such file"),
        (("a", "--quiet", "--max-tokens", "1", "--html", "/nowhere/x.html"), "cannot be written"),
    ],
)
def test_mistakes_are_named_in_one_line(command: Any, args: tuple[str, ...], message: str) -> None:
    code, _, err = command(*args)
    assert code == 2
    (line,) = (line for line in err.splitlines() if "error" in line)
    assert message in line


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), SMALL_ENGINE),
        (
            ("--num-gpu-blocks-override", "9"),
            SMALL_ENGINE | {"num_gpu_blocks_override": 9, "max_model_len": 32},
        ),
        (("--block-size", "2"), SMALL_ENGINE | {"block_size": 2, "max_model_len": 62}),
        (
            ("--max-model-len", "500"),
            SMALL_ENGINE | {"max_model_len": 500, "num_gpu_blocks_override": 126},
        ),
        (("--max-num-seqs", "9"), SMALL_ENGINE | {"max_num_seqs": 9}),
        (("--full-size",), {name: getattr(EngineArgs, name) for name in SMALL_ENGINE}),
    ],
)
def test_what_is_not_given_makes_a_small_engine_that_works(
    flags: tuple[str, ...], expected: dict[str, Any]
) -> None:
    engine_args = _engine_args(make_parser().parse_args(["trace", "a", *flags]))
    assert {name: getattr(engine_args, name) for name in SMALL_ENGINE} == expected


def test_help_needs_neither_torch_nor_rich() -> None:
    code = (
        "import sys; from nanovllm.entrypoints.cli.main import make_parser;"
        "make_parser().parse_args(['trace', 'x']);"
        "print([m for m in ('torch', 'rich', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
