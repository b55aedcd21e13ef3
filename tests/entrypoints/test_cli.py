"""The `nanovllm` command: text to standard output, all else to standard error."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import save_tiny_checkpoint

from nanovllm import LLM, EngineArgs, SamplingParams
from nanovllm.entrypoints.cli.generate import SAMPLING_FIELDS
from nanovllm.entrypoints.cli.main import main, make_parser

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture
def generate(folder: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `nanovllm generate` on the tiny checkpoint: (exit code, stdout, stderr)."""

    def call(*args: str) -> tuple[int, str, str]:
        flags = ["--model", folder, "--device", "cpu", "--num-gpu-blocks-override", "60"]
        try:
            code = main(["generate", "--ignore-eos", *flags, *args])
        except SystemExit as e:  # argparse
            code = int(e.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def expected(folder: str) -> str:
    """Greedy text of eight tokens after "a cat"."""
    llm = LLM(folder, device="cpu", num_gpu_blocks_override=60)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate("a cat", params, use_tqdm=False)[0].outputs[0].text


GREEDY = ("--temperature", "0", "--max-tokens", "8")


# ---- the text ----


def test_the_text_follows_the_prompt_and_stands_alone_on_standard_output(
    generate: Any, expected: str
) -> None:
    code, out, err = generate("a cat", *GREEDY)
    assert (code, out) == (0, f"a cat{expected}\n")
    assert "[5 prompt tokens (0 cached), 8 generated in" in err
    assert "tok/s, first token after" in err
    assert err.strip().endswith("finish reason: length]")


def test_quiet_leaves_only_the_text(generate: Any, expected: str) -> None:
    assert generate("a cat", *GREEDY, "-q") == (0, f"a cat{expected}\n", "")


def test_streamed_text_is_the_same_text(generate: Any, expected: str) -> None:
    code, out, _ = generate("a cat", *GREEDY, "--stream")
    assert (code, out) == (0, f"{expected}\n")


def test_several_prompts_and_samples_are_set_apart_by_empty_lines(
    generate: Any, expected: str
) -> None:
    _, out, _ = generate("a cat", "a cat", *GREEDY, "-q")
    assert out == f"a cat{expected}\n\na cat{expected}\n"
    _, out, err = generate("x", "--n", "3", "--max-tokens", "1", "--allowed-token-ids", "64")
    assert out == "x" + "a\n\nxa\n\nxa\n"
    assert "3 generated" in err


def test_json_has_everything_one_object_a_line(generate: Any, expected: str) -> None:
    flags = ("--logprobs", "1", "--prompt-logprobs", "0", "--json")
    code, out, _ = generate("a cat", "dog", *GREEDY, *flags)
    assert code == 0
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["prompt"] == "a cat"
    assert second["prompt"] == "dog"
    sample = first["outputs"][0]
    assert sample["text"] == expected
    assert len(sample["token_ids"]) == len(sample["logprobs"]) == 8
    assert sample["finish_reason"] == "length"
    assert first["prompt_logprobs"][0] is None
    assert first["metrics"]["num_generation_tokens"] == 8
    assert first["num_cached_tokens"] == 0


def test_verbose_shows_every_step(generate: Any, expected: str) -> None:
    """The prompt's five tokens first, then one a step; the last one sampled stays uncomputed."""
    _, out, err = generate("a cat", *GREEDY, "-v")
    assert out == f"a cat{expected}\n"
    lines = [line for line in err.splitlines() if "->" in line]
    assert [line.split()[0] for line in lines] == [str(i) for i in range(1, 9)]
    assert [line.split()[-1] for line in lines] == [
        "0:0->5",
        *(f"0:{i}->{i + 1}" for i in range(5, 12)),
    ]
    assert [line.split()[1] for line in lines] == ["1"] * 7 + ["0"]
    assert [line.split()[3] for line in lines] == ["1"] * 7 + ["0"]


def test_verbose_shows_chunks_and_waiting_requests(generate: Any) -> None:
    flags = ("--max-num-batched-tokens", "4", "--max-num-seqs", "1", "-v")
    _, _, err = generate("abcdef", "xyz", "--max-tokens", "1", *flags)
    steps = [line.split() for line in err.splitlines() if "->" in line]
    assert [(running, waiting, moved) for _, running, waiting, _, moved in steps] == [
        ("1", "1", "0:0->4"),
        ("0", "1", "0:4->6"),
        ("0", "0", "1:0->3"),
    ]


# ---- where prompts come from ----


def test_a_dash_is_standard_input(
    generate: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a cat\n"))
    assert generate("-", *GREEDY, "-q")[1] == f"a cat{expected}\n"


def test_a_text_file_has_a_prompt_a_line(generate: Any, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\n\na cat\n")
    _, out, _ = generate("--prompt-file", str(file), *GREEDY, "-q")
    assert out == f"a cat{expected}\n\na cat{expected}\n"


def test_a_jsonl_file_has_prompts_of_every_form(generate: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    prompts = ["a cat", [64, 65], {"prompt": "b", "cache_salt": "s"}, {"prompt_token_ids": [64]}]
    file.write_text("\n".join(json.dumps(prompt) for prompt in prompts))
    _, out, _ = generate("first", "--prompt-file", str(file), *GREEDY, "--json")
    outputs = [json.loads(line) for line in out.splitlines()]
    assert [output["prompt"] for output in outputs] == ["first", "a cat", None, "b", None]
    assert outputs[2]["prompt_token_ids"] == [64, 65]


def test_chat_applies_the_template_and_shows_only_the_answer(generate: Any) -> None:
    _, out, _ = generate("hi", "--chat", "--system", "be", *GREEDY, "--json")
    output = json.loads(out)
    assert output["prompt"] == "<|system|>be<|end|><|user|>hi<|end|><|assistant|>"
    _, text, _ = generate("hi", "--chat", "--system", "be", *GREEDY, "-q")
    assert text == output["outputs"][0]["text"] + "\n"


# ---- flags ----


def test_every_sampling_parameter_and_engine_argument_has_a_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """But for those that are the program's business."""
    internal = {"output_kind", "skip_clone"}
    names = {f.name for f in fields(SamplingParams) if f.init} - internal
    assert set(SAMPLING_FIELDS) == names
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    usage = capsys.readouterr().out
    for name in names | {f.name for f in fields(EngineArgs)}:
        assert f"--{name.replace('_', '-')}" in usage, name


def test_flags_reach_the_sampling_parameters_and_models_defaults_fill_the_rest(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingParams] = []

    def record(self: LLM, prompts: Any, params: list[SamplingParams], **kwargs: Any) -> list[Any]:
        seen.extend(params)
        return []

    monkeypatch.setattr(LLM, "generate", record)
    flags = (
        "--n 2 --temperature 0.5 --top-p 0.9 --min-p 0.1 --seed 3 --presence-penalty 0.1 "
        "--frequency-penalty 0.2 --repetition-penalty 1.1 --stop A --stop B --stop-token-ids 1,2 "
        "--include-stop-str-in-output --min-tokens 2 --logprobs 4 --bad-words C "
        "--logit-bias 5=1.5,6=-2 --allowed-token-ids 7,8 --no-skip-special-tokens"
    )
    model = ["--model", folder, "--device", "cpu", "--num-gpu-blocks-override", "60", "-q"]
    main(["generate", "a", *flags.split(), *model])
    main(["generate", "a", *model])
    given, default = seen
    assert given == SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=50,  # the checkpoint's generation_config.json
        min_p=0.1,
        seed=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        stop=["A", "B"],
        stop_token_ids=[1, 2],
        include_stop_str_in_output=True,
        min_tokens=2,
        max_tokens=128,
        logprobs=4,
        bad_words=["C"],
        logit_bias={5: 1.5, 6: -2.0},
        allowed_token_ids=[7, 8],
        skip_special_tokens=False,
    )
    assert default == SamplingParams(top_k=50, max_tokens=128)


def test_with_one_seed_every_prompt_and_sample_has_a_seed_of_its_own(generate: Any) -> None:
    """And the same command prints the same text again."""
    flags = ("--seed", "7", "--n", "2", "--max-tokens", "8", "--json")
    _, out, _ = generate("a cat", "a cat", *flags)
    texts = [o["text"] for line in out.splitlines() for o in json.loads(line)["outputs"]]
    assert len(set(texts)) == 4
    _, again, _ = generate("a cat", "a cat", *flags)
    assert texts == [o["text"] for line in again.splitlines() for o in json.loads(line)["outputs"]]


# ---- mistakes ----


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "there is no prompt; try: nanovllm generate"),
        (["a", "--model", "no/such"], "'no/such' is neither a folder nor a known name"),
        (["a", "--temperature", "-1"], "temperature must be non-negative"),
        (["a", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["a", "--n", "2", "--temperature", "0"], "n must be 1 when using greedy sampling"),
        ([""], "The prompt is empty"),
        (["a" * 200], "max_model_len 128"),
        (["a\udcff"], "not valid Unicode at position 1"),
        (["a", "--temprature", "1"], "unrecognized arguments: --temprature"),
        (["a", "--max-tokens", "many"], "invalid int value: 'many'"),
        (["a", "--stop-token-ids", "1,x"], "'1,x' is not of the form 1,2,3"),
        (["a", "--logit-bias", "5"], "'5' is not of the form 12=5,7=-100"),
        (["a", "--json", "--stream"], "not allowed with argument"),
        (["a", "b", "--stream"], "--stream shows one text"),
        (["a", "--system", "be nice"], "--system needs --chat"),
        (["--prompt-file", "no-such-file"], "'no-such-file' cannot be read: No such file"),
        (["a", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["a", "--max-model-len", "999"], "must lie between 1 and 128"),
    ],
)
def test_a_users_mistake_is_one_line_on_standard_error_and_exit_code_2(
    generate: Any, args: list[str], message: str
) -> None:
    code, out, err = generate(*args)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"a"\n{oops}\n', "line 2 of"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"3\n", "must be a string, a list"),
    ],
)
def test_a_broken_prompt_file_is_named(
    generate: Any, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    code, _, err = generate("--prompt-file", str(file))
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_an_engines_mistake_keeps_its_traceback(
    generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LLM, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(LLM, "generate", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        generate("a")


def test_ctrl_c_ends_with_130_and_no_traceback(
    generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: LLM, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupt)
    code, out, err = generate("a")
    assert (code, out, err) == (130, "", "nanovllm: interrupted\n")


# ---- the command itself ----


def test_help_and_version_are_instant_and_load_no_torch() -> None:
    program = (
        "import sys; from nanovllm.entrypoints.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    for args, text in (
        (["--version"], "nanovllm 0.1.0"),
        ([], 'nanovllm generate "Once upon a time"'),
        (["--help"], "generate"),
        (["generate", "--help"], "--temperature"),
    ):
        command = [sys.executable, "-c", program, *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        assert text in done.stdout


def test_an_unknown_command_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["sing"])
    assert exit_info.value.code == 2
    assert "invalid choice: 'sing'" in capsys.readouterr().err


def test_flags_are_not_abbreviated() -> None:
    """--temp must not come to mean something else when a flag is added."""
    with pytest.raises(SystemExit):
        make_parser().parse_args(["generate", "a", "--temp", "1"])


def test_a_reader_that_goes_away_ends_the_command_quietly(folder: str) -> None:
    """As in `nanovllm generate ... | head -1`; the start-up lines are on standard error."""
    command = [sys.executable, "-m", "nanovllm.entrypoints.cli.main", "generate", "a", "b"]
    command += ["--model", folder, "--device", "cpu", "--num-gpu-blocks-override", "60"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write_end)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert "INFO KV cache: 59 blocks" in done.stderr
