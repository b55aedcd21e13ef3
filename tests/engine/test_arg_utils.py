"""Engine arguments have vLLM's names and defaults, and the command line has all of them."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from nanovllm.engine.arg_utils import (
    ASSETS,
    DEFAULT_MODEL,
    EngineArgs,
    UsageContext,
    get_batch_defaults,
    resolve_model,
)
from nanovllm.exceptions import VLLMValidationError

MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    LlamaConfig(max_position_embeddings=MAX_MODEL_LEN, architectures=["X"]).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (UsageContext.LLM_CLASS, (4096, 256)),
        (UsageContext.OPENAI_API_SERVER, (2048, 128)),
        (UsageContext.ENGINE_CONTEXT, (2048, 128)),
    ],
)
def test_batch_defaults_on_a_cpu_are_vllms(
    context: UsageContext, expected: tuple[int, int]
) -> None:
    assert get_batch_defaults("cpu", context) == expected


@pytest.mark.parametrize(
    ("given", "num_batched_tokens", "num_seqs"),
    [
        ({}, 4096, 256),
        ({"max_model_len": 8}, 8 * 256, 256),  # all requests together have no more tokens
        ({"max_num_seqs": 4}, 4 * MAX_MODEL_LEN, 4),
        ({"max_num_batched_tokens": 16}, 16, 16),  # never more requests than tokens
        ({"max_num_batched_tokens": 500, "max_num_seqs": 3}, 500, 3),
    ],
)
def test_batch_limits_left_open_are_made_to_fit_each_other(
    folder: str, given: dict[str, int], num_batched_tokens: int, num_seqs: int
) -> None:
    args = EngineArgs(model=folder, device="cpu", **given)
    config = args.create_engine_config(UsageContext.LLM_CLASS).scheduler_config
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (num_batched_tokens, num_seqs)


def test_without_chunked_prefill_the_longest_prompt_fits_in_one_step(tmp_path: Path) -> None:
    LlamaConfig(max_position_embeddings=9000, architectures=["X"]).save_pretrained(tmp_path)
    args = EngineArgs(model=str(tmp_path), device="cpu", enable_chunked_prefill=False)
    assert args.create_engine_config().scheduler_config.max_num_batched_tokens == 9000


def test_every_argument_arrives_in_the_config(folder: str) -> None:
    args = EngineArgs(
        model=folder,
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
        seed=3,
        block_size=8,
        num_gpu_blocks_override=99,
        kv_cache_memory_bytes=1234,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        long_prefill_token_threshold=5,
        scheduler_reserve_full_isl=False,
        attention_backend="CPU_ATTN",
        max_logprobs=7,
        enforce_eager=True,
        served_model_name="me",
    )
    config = args.create_engine_config()
    assert config.model_config.dtype == "bfloat16"
    assert (config.model_config.seed, config.model_config.max_logprobs) == (3, 7)
    assert (config.model_config.enforce_eager, config.model_config.served_model_name) == (
        True,
        "me",
    )
    assert config.load_config.load_format == "dummy"
    assert config.cache_config.block_size == 8
    assert config.cache_config.num_gpu_blocks_override == 99
    assert config.cache_config.kv_cache_memory_bytes == 1234
    assert config.cache_config.enable_prefix_caching is False
    assert config.scheduler_config.policy == "priority"
    assert config.scheduler_config.long_prefill_token_threshold == 5
    assert config.scheduler_config.scheduler_reserve_full_isl is False
    assert config.attention_backend == "CPU_ATTN"
    defaults = EngineArgs(model=folder, device="cpu").create_engine_config()
    assert defaults.cache_config.block_size == 16
    assert defaults.cache_config.enable_prefix_caching is True
    assert defaults.scheduler_config.enable_chunked_prefill is True


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "int4"}, "int4"),
        ({"max_model_len": MAX_MODEL_LEN + 1}, "between 1 and 64"),
        ({"scheduling_policy": "lifo"}, "lifo"),
        ({"load_format": "gguf"}, "gguf"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"model": "no/such/model"}, "'no/such/model' is neither a folder nor a known name"),
        ({"model": ""}, "neither a folder nor a known name"),
        ({"tokenizer": "no/such/tokenizer"}, "no/such/tokenizer"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_by_value(
    folder: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        EngineArgs(**{"model": folder, "device": "cpu"} | given).create_engine_config()


def test_an_unknown_argument_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(
        VLLMValidationError, match="'max_num_seq' is unknown; did you mean 'max_num_seqs'"
    ):
        EngineArgs.from_kwargs(max_num_seq=3)
    with pytest.raises(VLLMValidationError, match="'frobnicate' is unknown; known: model"):
        EngineArgs.from_kwargs(frobnicate=3)


def test_a_model_is_a_folder_or_a_name_in_the_package_or_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cached-model").mkdir()
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path))
    assert resolve_model("cached-model") == str(tmp_path / "cached-model")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model(DEFAULT_MODEL) == str(ASSETS / DEFAULT_MODEL)


# ---- the command line ----


def parse(*flags: str) -> EngineArgs:
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(parser.parse_args(flags))


def test_flags_not_given_leave_the_defaults_alone() -> None:
    assert parse() == EngineArgs()


def test_every_argument_has_a_flag_that_sets_it() -> None:
    """Dashes for underscores; --no-x for what is on by default."""
    sample = {str: "cpu", int: 7, float: 0.5}
    for f in fields(EngineArgs):
        kind = f.metadata.get("type", type(f.default))
        flag = "--" + f.name.replace("_", "-")
        if f.name == "override_generation_config":
            assert parse(flag, '{"top_k": 3}').override_generation_config == {"top_k": 3}
        elif kind is bool and f.default is False:
            assert getattr(parse(flag), f.name) is True
        elif kind is bool:
            assert getattr(parse("--no-" + flag[2:]), f.name) is False
            assert getattr(parse(flag), f.name) is True
        else:
            value = f.metadata["choices"][-1] if "choices" in f.metadata else sample[kind]
            assert getattr(parse(flag, str(value)), f.name) == value
