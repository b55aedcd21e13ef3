"""The same tokens as transformers, whatever the batching, chunking, caching or preemption."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dense_backend import save_random_checkpoint
from same_tokens import LOGITS_TOLERANCE, Comparison, compare_with_transformers
from test_models import CONFIGS, ROPES, rope_config
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nanovllm import LLM

EMBEDDED = Path(__file__).parents[1] / "nanovllm" / "assets" / "tiny-stories"
SMOLLM2 = Path(
    os.environ.get("NANOVLLM_CACHE", Path.home() / ".cache" / "nanovllm"), "SmolLM2-135M-Instruct"
)
# What the engine is put through. The prompts share prefixes; the last two settings need little.
SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": False},
    "prefix caching": {"block_size": 4, "max_num_seqs": 6},
    "radix cache": {"block_size": 1, "max_num_seqs": 6, "prefix_cache_backend": "radix"},
    "few blocks": {"block_size": 4},
    "async scheduling": {"block_size": 4, "async_scheduling": True},
}


def make_prompts(texts: Iterator[list[int]], num: int, longest: int) -> list[list[int]]:
    """Beginnings of texts, from 1 token on. Half of the prompts have a common beginning."""
    rng = random.Random(0)
    common = next(texts)[: longest // 2]
    prompts = []
    for i in range(num):
        tail = next(texts)[: rng.randint(1, longest - len(common))]
        prompts.append(common + tail if i % 2 else tail)
    return prompts


def random_texts(vocab_size: int) -> Iterator[list[int]]:
    rng = random.Random(1)
    while True:
        yield [rng.randrange(vocab_size) for _ in range(128)]


def stories(folder: Path) -> Iterator[list[int]]:
    """Held-out stories of the embedded model, as tokens of the model in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for line in (EMBEDDED / "heldout.txt").read_text(encoding="utf-8").splitlines():
        yield tokenizer(json.loads(line)["story"])["input_ids"]


def run(
    folder: Path,
    hf_model: PreTrainedModel,
    name: str,
    num_prompts: int,
    longest: int,
    outputs: int,
    tolerance: float = LOGITS_TOLERANCE,
) -> Comparison:
    settings = dict(SETTINGS[name])
    max_model_len = longest + outputs
    if name in ("few blocks", "async scheduling"):
        # One request of full length fits, the batch by far does not.
        settings["num_gpu_blocks_override"] = 2 * -(-max_model_len // settings["block_size"]) + 1
    settings = {"max_num_seqs": 16, "max_model_len": max_model_len} | settings
    llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **settings)
    has_tokenizer = (folder / "tokenizer.json").exists()
    texts = stories(folder) if has_tokenizer else random_texts(hf_model.config.vocab_size)
    prompts = make_prompts(texts, num_prompts, longest)
    result = compare_with_transformers(llm, hf_model, prompts, outputs, tolerance)
    assert result.num_tokens == num_prompts * outputs
    if name in ("few blocks", "async scheduling"):
        assert result.num_preemptions > 0, "meant to preempt"
    if name in ("prefix caching", "radix cache"):
        assert result.num_cached_tokens > 0, "meant to hit"
    print(f"{folder.name}, {name}: {result}")
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_through_the_whole_engine(name: str, tmp_path: Path) -> None:
    """Random weights; chunked, then preempted and cached."""
    hf_model = save_random_checkpoint(tmp_path, CONFIGS[name])
    run(tmp_path, hf_model, "chunked", num_prompts=6, longest=40, outputs=12)
    run(tmp_path, hf_model, "few blocks", num_prompts=6, longest=40, outputs=12)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_on_one_architecture(name: str, tmp_path: Path) -> None:
    """Random weights, all that the engine can be put through."""
    hf_model = save_random_checkpoint(tmp_path, CONFIGS["qwen3"])
    run(tmp_path, hf_model, name, num_prompts=12, longest=40, outputs=12)


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_type_through_the_whole_engine(name: str, tmp_path: Path) -> None:
    """Chunks and cached prefixes start at other positions than 0, and RoPE knows."""
    hf_model = save_random_checkpoint(tmp_path, rope_config(ROPES[name]))
    run(tmp_path, hf_model, "chunked", num_prompts=4, longest=48, outputs=12)
    run(tmp_path, hf_model, "prefix caching", num_prompts=6, longest=48, outputs=12)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_embedded_model_gives_the_tokens_of_transformers(name: str) -> None:
    """Trained weights, more and longer prompts."""
    hf_model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype="float32").eval()
    run(EMBEDDED, hf_model, name, num_prompts=12, longest=96, outputs=32)


@pytest.mark.real_model
@pytest.mark.parametrize("name", SETTINGS)
def test_smollm2_gives_the_tokens_of_transformers(name: str) -> None:
    """Real weights: 40 prompts, 64 tokens each.

    transformers computes in float64 here: on logits up to 38 a float32 run errs by up to 6e-5, and
    the difference of two would measure both. The largest difference seen is 9.0e-5; processors that
    add in another order get the room to 1.5e-4.
    """
    hf_model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype="float64").eval()
    run(SMOLLM2, hf_model, name, num_prompts=40, longest=64, outputs=64, tolerance=1.5e-4)
