"""The tokens do not depend on whether the host waits for them."""

from __future__ import annotations

import random

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.v1.worker.async_gpu_model_runner import AsyncGPUModelRunner, resolve_input_ids

pytestmark = pytest.mark.filterwarnings("ignore")


def random_params(rng: random.Random, bad_words: bool) -> SamplingParams:
    """Greedy or seeded, so that the tokens are determined; with everything that reads outputs."""
    return SamplingParams(
        temperature=rng.choice((0.0, 0.8, 1.2)),
        seed=rng.randrange(1000),
        max_tokens=rng.randrange(1, 40),
        min_tokens=0,
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((-1, 20)),
        ignore_eos=rng.random() < 0.5,
        stop=rng.choice(([], [" the"], ["."])),
        presence_penalty=rng.choice((0.0, 0.0, 1.5, -2.0)),  # below 0: say it again
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        bad_words=rng.choice(([], [], [" little girl", " was"])) if bad_words else [],
        logprobs=rng.choice((None, None, 2)),
    )


def generate(params: list[SamplingParams], prompts: list[list[int]], **engine_args):  # type: ignore[no-untyped-def]
    llm = LLM(max_model_len=128, block_size=4, max_num_seqs=8, max_num_batched_tokens=48,
              **engine_args)  # fmt: skip
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return llm, [
        (o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs
    ]


@pytest.mark.parametrize("bad_words", [False, True])
@pytest.mark.parametrize("num_blocks", [None, 41])
def test_async_and_sync_engines_give_the_same_tokens(
    num_blocks: int | None, bad_words: bool
) -> None:
    """41 blocks hold one request of full length and little more: many are preempted. (A batch with
    bad words waits for its tokens, any other does not.)"""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 2000) for _ in range(rng.randrange(1, 60))] for _ in range(40)]
    params = [random_params(rng, bad_words) for _ in prompts]
    _, expected = generate(params, prompts, num_gpu_blocks_override=num_blocks)
    llm, got = generate(params, prompts, num_gpu_blocks_override=num_blocks, async_scheduling=True)
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    assert isinstance(core.model_executor.model_runner, AsyncGPUModelRunner)
    assert got == expected


def test_an_aborted_request_leaves_nothing_behind() -> None:
    """Its last token is still under way when it goes, to a place that by then belongs to the prompt
    of a new request of the same id."""
    llm = LLM(max_model_len=128, async_scheduling=True, max_num_batched_tokens=16, max_num_seqs=4)
    engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = [5 + i for i in range(100)]
    alone = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    assert llm.reset_prefix_cache()
    engine.add_request("x", [900 + i for i in range(30)], params)
    for _ in range(4):
        engine.step()
    engine.abort_request(["x"])
    engine.add_request("x", prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == alone


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_negative_input_ids_are_resolved(device: str) -> None:
    """-1 - r becomes what row r has sampled; other ids stay."""
    sampled = torch.randint(0, 50_000, (7,), device=device)
    input_ids = torch.tensor([4, -1, 0, -7, -3, 12], device=device)
    resolve_input_ids(input_ids, sampled)
    expected = [4, sampled[0].item(), 0, sampled[6].item(), sampled[2].item(), 12]
    assert input_ids.tolist() == expected


def test_the_kernel_resolves_as_torch_does() -> None:
    """The kernel, interpreted, on more tokens than a program takes."""
    from nanovllm.triton_utils import triton
    from nanovllm.v1.worker.async_gpu_model_runner import _resolve_input_ids_kernel

    generator = torch.Generator().manual_seed(0)
    sampled = torch.randint(0, 50_000, (300,), generator=generator)
    input_ids = torch.randint(-300, 300, (2500,), generator=generator)
    expected = torch.where(input_ids < 0, sampled[(-1 - input_ids).clamp(min=0)], input_ids)
    _resolve_input_ids_kernel[(triton.cdiv(2500, 1024),)](input_ids, sampled, 2500, BLOCK=1024)
    assert torch.equal(input_ids, expected)
