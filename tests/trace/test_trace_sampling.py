"""The sampler's stages against NumPy, and against what the engine reports."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.trace import trace
from nanovllm.trace.sampling import sampling_stages, trace_sampling
from nanovllm.v1.sample.logits_processor import LogitsProcessors
from nanovllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from nanovllm.v1.sample.logits_processor.interface import BatchUpdate
from nanovllm.v1.sample.sampler import Sampler
from tests.trace.trace_scenario import PROMPTS, make_llm, make_params

LOGITS = [2.0, 1.0, 0.5, -1.0, 1.5]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def metadata(temperature: float, min_p: float, top_k: int, top_p: float) -> Any:
    """Two rows: a neutral one, and the one looked at."""
    processor = MinPLogitsProcessor(2, torch.device("cpu"))
    params = [SamplingParams(min_p=0.0), SamplingParams(min_p=min_p)]
    added = [(row, one, [], []) for row, one in enumerate(params)]
    processor.update_state(BatchUpdate(2, [], added, []))
    return SimpleNamespace(
        temperature=torch.tensor([1.0, temperature]),
        all_random=temperature > 0,
        all_greedy=False,
        top_k=torch.tensor([5, top_k], dtype=torch.int32),
        top_p=torch.tensor([1.0, top_p]),
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        no_penalties=True,
        logitsprocs=LogitsProcessors([processor]),
    )


def test_five_tokens_worked_out_with_numpy() -> None:
    """Temperature 0.5, then min-p 0.02, then the top 3, then 0.9 of what they have."""
    logits = torch.tensor([[0.0] * 5, LOGITS])
    stages = sampling_stages(Sampler(), logits, metadata(0.5, 0.02, 3, 0.9), row=1)
    assert [(name, setting) for name, setting, _ in stages] == [
        ("model", ""),
        ("temperature", "T = 0.5"),
        ("min_p", "0.02"),
        ("top_k", "k = 3"),
        ("top_p", "p = 0.9"),
    ]
    raw = np.array(LOGITS)
    scaled = softmax(raw / 0.5)
    after_min_p = np.where(scaled >= 0.02 * scaled.max(), scaled, 0)
    kept = np.argsort(-after_min_p)[:3]
    after_top_k = np.zeros(5)
    after_top_k[kept] = after_min_p[kept] / after_min_p[kept].sum()
    mass_before = np.concatenate([[0], np.cumsum(after_top_k[kept])[:-1]])
    survivors = kept[mass_before < 0.9]
    after_top_p = np.zeros(5)
    after_top_p[survivors] = after_top_k[survivors] / after_top_k[survivors].sum()
    expected = [softmax(raw), scaled, after_min_p / after_min_p.sum(), after_top_k, after_top_p]
    for (_, _, probs), wanted in zip(stages, expected, strict=True):
        np.testing.assert_allclose(probs.numpy(), wanted, atol=1e-6)
    assert [int((p > 0).sum()) for _, _, p in stages] == [5, 5, 4, 3, 2]
    assert logits.tolist() == [[0.0] * 5, LOGITS], "the model's logits are left alone"


def test_a_greedy_row_has_one_choice() -> None:
    stages = sampling_stages(Sampler(), torch.tensor([[0.0] * 5, LOGITS]), metadata(0, 0, 5, 1), 1)
    assert [name for name, _, _ in stages] == ["model", "greedy"]
    assert stages[-1][2].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_stages_that_a_row_does_not_use_are_left_out() -> None:
    stages = sampling_stages(
        Sampler(), torch.tensor([[0.0] * 5, LOGITS]), metadata(0.7, 0, 5, 1), 1
    )
    assert [name for name, _, _ in stages] == ["model", "temperature"]


def test_the_summary_counts_and_adds_up() -> None:
    stages = sampling_stages(
        Sampler(), torch.tensor([[0.0] * 5, LOGITS]), metadata(0.5, 0.02, 3, 0.9), 1
    )
    summary = trace_sampling("A", stages, str)
    assert [s.num_tokens for s in summary.stages] == [5, 5, 4, 3, 2]
    assert all(s.total == pytest.approx(1.0, abs=1e-6) for s in summary.stages)
    entropies = [s.entropy for s in summary.stages]
    assert entropies == sorted(entropies, reverse=True), "every stage narrows the choice"
    assert [t.token_id for t in summary.tokens] == [0, 4, 1, 2, 3], "likeliest first"
    last = [t.probs[-1] for t in summary.tokens]
    assert entropies[-1] == pytest.approx(-sum(p * math.log2(p) for p in last if p > 0), abs=1e-6)


def test_in_the_engine_every_stage_sums_to_1_and_the_sampled_token_survives(
    trace_model: Path,
) -> None:
    params = make_params(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, repetition_penalty=1.3
    )
    run = trace(make_llm(trace_model), PROMPTS, params, watch=[1, "A"])
    looked_at = [(step, sampling) for step in run for sampling in step.sampling]
    assert len(looked_at) == 24, "12 tokens of either request"
    for step, sampling in looked_at:
        names = [stage.name for stage in sampling.stages]
        assert names == ["model", "processors", "temperature", "min_p", "top_k", "top_p"]
        assert all(stage.total == pytest.approx(1.0, abs=1e-5) for stage in sampling.stages)
        counts = [stage.num_tokens for stage in sampling.stages]
        assert counts == sorted(counts, reverse=True)
        assert counts[4] <= 20
        (sampled,) = (s for s in step.sampled if s.request_id == sampling.request_id)
        assert [sampling.sampled_token_id] == sampled.token_ids
        (chosen,) = (t for t in sampling.tokens if t.token_id == sampling.sampled_token_id)
        assert chosen.probs[-1] > 0


def test_the_models_distribution_is_what_logprobs_report(trace_model: Path) -> None:
    """Raw logprobs come out of the engine another way."""
    params = make_params(temperature=0.8, top_k=20, seed=1, logprobs=3)
    outputs = make_llm(trace_model).generate(PROMPTS[0], params, use_tqdm=False)
    run = trace(make_llm(trace_model), PROMPTS[0], params, watch=["A"])
    logprobs = outputs[0].outputs[0].logprobs
    assert logprobs is not None
    samplings = [s for step in run for s in step.sampling]
    for reported, sampling in zip(logprobs, samplings, strict=True):
        traced = {t.token_id: t.probs[0] for t in sampling.tokens}
        for token_id, logprob in reported.items():
            assert traced[token_id] == pytest.approx(math.exp(logprob.logprob), rel=1e-4)


def test_only_the_chosen_steps_are_looked_at(trace_model: Path) -> None:
    run = trace(
        make_llm(trace_model),
        PROMPTS,
        make_params(),
        watch=["A"],
        watch_step=lambda step: step == 4,
    )
    assert [(step.step, len(step.sampling)) for step in run if step.sampling] == [(4, 1)]
