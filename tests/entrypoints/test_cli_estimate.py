"""`nanovllm estimate`: tables with formulas, JSON, and one line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import save_tiny_checkpoint

from nanovllm.entrypoints.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def estimate(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run it: (exit code, stdout, stderr)."""

    def call(*args: str) -> tuple[int, str, str]:
        try:
            code = main(["estimate", *args])
        except SystemExit as e:  # argparse
            code = int(e.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_formulas_stand_beside_their_results(estimate: Any) -> None:
    code, out, err = estimate("llama-2-70b", "--hardware", "h200-measured", "--batch-size", "4")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert "a token 2 × L × kv × d × c = 2 × 80 × 8 × 128 × 2 320 KiB" in lines
    assert "bfloat16, float16 N × 2 = 68,976,648,192 × 2 128.5 GiB" in lines
    assert "lm_head 2 × B × D × V = 2 × 4 × 8,192 × 32,000 2.097 GFLOP" in lines
    assert "Training" not in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("columns", ["40", "80", "120"])
@pytest.mark.parametrize("name", ["tiny-stories", "gpt3-175b"])
def test_a_narrow_page_folds_formulas_and_cuts_no_name_and_no_number(
    estimate: Any, name: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = estimate(name, "--training")[1]
    monkeypatch.setenv("COLUMNS", columns)
    narrow = estimate(name, "--training")[1]
    assert "…" not in narrow

    def ends(text: str) -> set[str]:
        """The last word of each line that has a result: two spaces stand before it."""
        return {line.split("  ")[-1].strip() for line in text.splitlines() if "  " in line.strip()}

    assert ends(wide) - {""} <= ends(narrow)
    section = narrow.split("Parameters")[1].split("Prefill")[0]
    assert max(map(len, section.splitlines())) <= max(int(columns), 56)


@pytest.mark.parametrize("name", ["tiny-stories", "gpt3-175b"])
@pytest.mark.parametrize("dtype", ["auto", "int4"])
def test_every_option_can_be_given_and_nothing_is_wider_than_the_page(
    estimate: Any, name: str, dtype: str
) -> None:
    numbers = ("--prompt-len", "100", "--context-len", "300", "--train-tokens", "3e9")
    code, out, _ = estimate(name, "--dtype", dtype, "--training", "--recompute", "full", *numbers)
    assert code == 0
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 100
    for title in ("Parameters", "Prefill: 1 × 100 tokens", "Decode: 1 × 1 token after 299"):
        assert title in out
    assert "Training on 3e+09 tokens" in out


def test_the_embedded_model_is_the_default_and_a_folder_and_its_config_are_the_same(
    estimate: Any, tmp_path: Path
) -> None:
    assert json.loads(estimate("--json")[1])["model"]["name"] == "tiny-stories"
    folder = save_tiny_checkpoint(tmp_path)
    one, other = (
        json.loads(estimate("--json", str(path))[1]) for path in (folder, folder / "config.json")
    )
    assert one["model"].pop("name") == str(folder)
    assert other["model"].pop("name") == str(folder / "config.json")
    assert one == other
    assert one["dtype"] == "float32"


def test_this_machine_can_be_the_hardware(estimate: Any) -> None:
    args = ("--hardware", "measured", "--device", "cpu", "--json", "smollm2-135m")
    data = json.loads(estimate(*args)[1])
    measured = next(iter(data["hardware"].values()))
    assert measured["source"].startswith("measured now: ")
    assert measured["decode_seconds"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no-such-model"], "'no-such-model' is neither a folder, a config.json"),
        (["other.json"], "'other.json' is no config.json"),
        (["--hardware", "h900"], "invalid choice: 'h900'"),
        (["--batch-size", "0"], "'0' is not a whole number from 1"),
        (["--train-tokens", "1.5"], "'1.5' is not a whole number from 1"),
        (["--mfu", "2"], "'2' is not above 0 and at most 1"),
    ],
)
def test_a_mistake_is_named_in_one_line(estimate: Any, args: list[str], message: str) -> None:
    code, out, err = estimate(*args)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_quantized_checkpoints_need_a_dtype(estimate: Any, tmp_path: Path) -> None:
    config_file = save_tiny_checkpoint(tmp_path) / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    code, _, err = estimate(str(config_file))
    assert code == 2
    assert "are quantized; say --dtype fp8, int8 or int4" in err
    assert estimate(str(config_file), "--dtype", "fp8")[0] == 0


def test_a_published_shape_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from nanovllm.entrypoints.cli.main import main\n"
        "main(['estimate', 'llama-2-7b', '--training'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
