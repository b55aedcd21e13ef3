"""Inputs and moments at which the engine once broke, kept as plain tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.exceptions import VLLMValidationError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_model_len=128, num_gpu_blocks_override=64, scheduling_policy="priority")


def tokens(llm: LLM, prompts: list[Any], params: Any = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_request_that_fits_finds_room_beside_a_cached_copy_of_itself() -> None:
    """Radix: it once locked that copy, and preempted itself for ever."""
    llm = LLM(
        prefix_cache_backend="radix", block_size=4, num_gpu_blocks_override=17,
        max_model_len=64, max_num_batched_tokens=24, max_num_seqs=8,
    )  # fmt: skip
    ids = list(range(100, 163))
    one = SamplingParams(max_tokens=1, temperature=0.0)
    tokens(llm, [{"prompt_token_ids": ids[:25]}], one)
    skip = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompt = {"prompt_token_ids": ids}
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    llm.llm_engine.add_request("x", prompt, skip)
    for _ in range(20):
        llm.llm_engine.step()
    assert not llm.llm_engine.has_unfinished_requests()
    assert core.scheduler.kv_cache_manager.usage == 0


@pytest.mark.parametrize("priority", ["high", None, [1], 1.5, True])
def test_a_priority_that_cannot_be_compared_is_refused(llm: LLM, priority: Any) -> None:
    """It once stayed in the queue's heap and broke every later call."""
    with pytest.raises(VLLMValidationError, match="priority"):
        tokens(llm, ["a", {"prompt": "b", "priority": priority}, "c"])
    assert len(tokens(llm, ["a", "b"])) == 2


@pytest.mark.parametrize("salt", ["\ud83d", 5, ""])
def test_a_salt_that_cannot_be_hashed_is_refused(llm: LLM, salt: Any) -> None:
    """It once failed in the middle of a step, when the first block was full, and took all along."""
    with pytest.raises(VLLMValidationError, match="cache_salt"):
        tokens(llm, ["a", {"prompt": "b", "cache_salt": salt}])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_that_fails_after_somebody_has_ended_leaves_a_clean_engine(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ended request once stayed among the running ones, and the engine idled for ever."""
    llm = LLM(max_model_len=128, num_gpu_blocks_override=64, async_scheduling=async_scheduling)
    expected = tokens(llm, ["The cat", "A dog"])
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    scheduler, update = core.scheduler, type(core.scheduler)._update_request_with_output

    def fail_when_somebody_has_ended(request: Any, new_token_ids: list[int]) -> Any:
        if any(r.is_finished() for r in scheduler.running):
            raise RuntimeError("planted")
        return update(scheduler, request, new_token_ids)

    monkeypatch.setattr(scheduler, "_update_request_with_output", fail_when_somebody_has_ended)
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with pytest.raises(RuntimeError, match="planted"):
        tokens(llm, ["The cat", "A dog"], [short, GREEDY])
    assert tokens(llm, ["The cat", "A dog"]) == expected
    assert core.scheduler.kv_cache_manager.usage == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", "8"), ("temperature", None), ("n", 0), ("top_p", 7.0), ("logprobs", -5)],
)
def test_parameters_changed_after_they_were_made_are_checked_again(
    llm: LLM, name: str, value: Any
) -> None:
    """Such a request once failed in the middle of a batch, or was answered with nothing."""
    params = SamplingParams(max_tokens=4)
    setattr(params, name, value)
    with pytest.raises(VLLMValidationError, match=name):
        tokens(llm, ["a", "b"], [GREEDY, params])
    assert len(tokens(llm, ["a"])) == 1


def test_more_logprobs_than_there_are_tokens_are_refused() -> None:
    """top-k over the vocabulary cannot give them; the limit is the smaller of the two."""
    llm = LLM(max_model_len=64, num_gpu_blocks_override=64, max_logprobs=5000)
    with pytest.raises(VLLMValidationError, match="3072"):
        tokens(llm, ["a"], SamplingParams(logprobs=4000))


def test_prompt_logprobs_do_not_take_cached_prefixes_even_if_asked() -> None:
    """The cached tokens' logprobs were once whatever stood in memory."""
    with pytest.raises(VLLMValidationError, match="skip_reading_prefix_cache"):
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)


def test_lines_of_a_prompt_file_end_where_lines_end(tmp_path: Path) -> None:
    """A BOM is not part of the first prompt, and U+2028 does not cut one in two."""
    from nanovllm.entrypoints.cli.generate import _read_prompt_file

    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo\u2028and more\n".encode())
    assert _read_prompt_file(path) == ["one", "two\u2028and more"]
    path = tmp_path / "deep.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(VLLMValidationError, match="line 1"):
        _read_prompt_file(path)


def test_the_command_works_without_a_home_and_with_an_ascii_terminal(tmp_path: Path) -> None:
    """As an arbitrary user of a container has it."""
    env = {k: v for k, v in os.environ.items() if k != "HOME"} | {"PYTHONIOENCODING": "ascii"}
    command = [
        sys.executable,
        "-m",
        "nanovllm",
        "generate",
        "caf\u00e9 \u732b",
        "--max-tokens",
        "4",
    ]
    result = subprocess.run(command, env=env, capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    closed = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m nanovllm generate hi --max-tokens 2 >&-"],
        env=env, capture_output=True, timeout=120,
    )  # fmt: skip
    assert closed.returncode == 0, closed.stderr.decode()
