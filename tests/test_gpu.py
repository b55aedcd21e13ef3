"""The engine on a CUDA device: the same tokens, and a KV cache sized by measuring."""

from __future__ import annotations

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.exceptions import VLLMValidationError

pytestmark = pytest.mark.gpu

PROMPTS = ["Once upon a time", "The little dog", "In a small town by the sea", "One day, Mia"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)


def generate(**engine_args: object) -> list[list[int]]:
    llm = LLM(**engine_args)  # type: ignore[arg-type]
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.llm_engine.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_float32_on_the_gpu_gives_the_tokens_of_the_cpu() -> None:
    """Batched, and chunked with so few blocks that it preempts."""
    expected = generate(device="cpu", dtype="float32")
    assert generate(device="cuda", dtype="float32", max_model_len=512) == expected
    assert (
        generate(
            device="cuda",
            dtype="float32",
            max_model_len=64,
            num_gpu_blocks_override=10,
            max_num_batched_tokens=16,
            max_num_seqs=4,
        )
        == expected
    )


def test_the_kv_cache_takes_the_share_of_memory_that_was_asked_for() -> None:
    """A profile run measures what else is needed; cache and the rest stay within the share."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    llm = LLM(device="cuda", gpu_memory_utilization=0.5)
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    cache = core.kv_cache_config.size_bytes
    assert 0.4 * total < cache <= 0.5 * total
    output = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 48
    assert torch.cuda.max_memory_reserved() <= 0.5 * total
    llm.llm_engine.shutdown()


def test_asking_for_more_memory_than_is_free_names_the_knob() -> None:
    """gpu_memory_utilization is what the user can turn."""
    free, total = torch.cuda.mem_get_info()
    hog = torch.empty(int(free - 0.3 * total), dtype=torch.uint8, device="cuda")
    with pytest.raises(VLLMValidationError, match="gpu_memory_utilization"):
        LLM(device="cuda", gpu_memory_utilization=0.6)
    del hog
    torch.cuda.empty_cache()
