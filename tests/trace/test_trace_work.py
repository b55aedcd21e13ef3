"""`nanovllm trace --hardware`: what each step computes and moves, beside the ceilings."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nanovllm.entrypoints.cli.main import main
from nanovllm.trace import Trace
from nanovllm.v1.metrics.hardware import HARDWARE
from nanovllm.v1.metrics.perf import ExecutionContext, ModelMetrics

WORK = re.compile(
    r"^work +(\S+ \w)FLOP, (\S+ \w)B in (\S+) ms: (\S+ \w)FLOP/s \(MFU (\S+)%\), (\S+ \w)B/s "
    r"\(MBU (\S+)%\)",
    re.MULTILINE,
)
PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9}
PROMPTS = ("once upon a time", "twice", "--arrive", "0,1", "--max-tokens", "3", "--ignore-eos")


def number(text: str) -> float:
    """ "1.5 M", "12.3" """
    value, _, prefix = text.partition(" ")
    return float(value) * PREFIXES.get(prefix, 1)


@pytest.fixture
def command(trace_model: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*args: str) -> tuple[int, str, str]:
        code = main(["trace", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def run(command: Any, trace_model: Path, tmp_path: Path) -> tuple[str, Trace, str]:
    """(what was printed, the trace, the file it is in)"""
    file = str(tmp_path / "trace.jsonl")
    flags = ("--model", str(trace_model), "--device", "cpu", "--hardware", "m4-max")
    code, out, _ = command(*flags, *PROMPTS, "--jsonl", file)
    assert code == 0
    return out, Trace.from_jsonl(Path(file).read_text()), file


def test_each_step_shows_its_work_and_its_share_of_the_ceilings(run: Any) -> None:
    out, trace, _ = run
    metrics = ModelMetrics(trace.engine.model_shape, trace.engine.dtype)
    assert trace.engine.dtype == "float32"
    shown = [tuple(map(number, line)) for line in WORK.findall(out)]
    assert len(shown) == len(trace) > 3
    for step, (flop, num_bytes, ms, flop_s, mfu, bytes_s, mbu) in zip(trace, shown, strict=True):
        lens = [b - a for a, b in pairwise(step.batch.query_start_loc)]
        stats = metrics.get_step_perf_stats_per_gpu(
            ExecutionContext.from_lens(lens, step.batch.seq_lens)
        )
        seconds = (step.span("execute").duration + step.span("sample").duration) / 1e6
        assert flop == pytest.approx(stats.num_flops_per_gpu, rel=1e-3)
        assert num_bytes == pytest.approx(stats.num_bytes_per_gpu, rel=1e-3)
        assert ms == pytest.approx(seconds * 1e3, abs=0.006)
        assert flop_s == pytest.approx(stats.num_flops_per_gpu / seconds, rel=1e-3)
        assert bytes_s == pytest.approx(stats.num_bytes_per_gpu / seconds, rel=1e-3)
        m4_max = HARDWARE["m4-max"]
        assert mfu == pytest.approx(100 * flop_s / m4_max.rate("float32"), abs=0.051)
        assert mbu == pytest.approx(100 * bytes_s / m4_max.bandwidth, abs=0.051)


def test_a_trace_read_back_shows_the_same(command: Any, run: Any) -> None:
    out, _, file = run
    again = command("--from", file, "--hardware", "m4-max")[1]
    assert WORK.findall(again) == WORK.findall(out)
    assert not WORK.search(command("--from", file)[1])  # unless asked for


def test_a_trace_of_before_is_read_but_its_work_cannot_be_shown(command: Any, run: Any) -> None:
    file = Path(run[2])
    head, *steps = file.read_text().splitlines()
    data = json.loads(head)
    del data["engine"]["model_shape"], data["engine"]["dtype"]
    file.write_text("\n".join([json.dumps(data), *steps]))
    assert command("--from", str(file))[0] == 0
    code, _, err = command("--from", str(file), "--hardware", "h200")
    assert code == 2
    assert "does not say how large the model is" in err


def test_unknown_hardware_is_refused(command: Any, run: Any) -> None:
    code, _, err = command("--from", run[2], "--hardware", "abacus")
    assert code == 2
    assert "hardware 'abacus' is unknown" in err
