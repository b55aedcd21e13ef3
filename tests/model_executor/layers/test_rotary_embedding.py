"""What every rotary encoding guarantees, and the frequencies that are not transformers' defaults.

That logits and tables are those of transformers is in tests/models/test_models.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_backend import load, make_prompts, save_random_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm.model_executor.layers.rotary_embedding import (
    DynamicNTKScalingRotaryEmbedding,
    NTKScalingRotaryEmbedding,
    RotaryEmbedding,
    get_rope,
)

HEAD_SIZE, MAX_POSITION, THETA = 16, 1024, 500.0
ORIGINAL = {"original_max_position_embeddings": 64}
TYPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "ntk": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | ORIGINAL,
    "yarn": {"factor": 4.0} | ORIGINAL,
}
ROPES: dict[str, RotaryEmbedding] = {
    name: get_rope(HEAD_SIZE, MAX_POSITION, {"rope_type": name, "rope_theta": THETA} | rope)
    for name, rope in TYPES.items()
} | {
    "dynamic, beyond the trained length": DynamicNTKScalingRotaryEmbedding(
        HEAD_SIZE, MAX_POSITION, THETA, 4.0, max_trained_positions=256
    )
}
every_rope = pytest.mark.parametrize("name", ROPES)
seeds = st.integers(0, 2**31)
halves = st.integers(0, MAX_POSITION // 2 - 1)  # the sum of two is still a position

# Angles are float32 products of up to 1,023 radians, so off by up to 3e-5 (half a unit in the last
# place), and a property holds to a few times that.
CLOSE = {"atol": 1e-3, "rtol": 0.0}


def vectors(seed: int, count: int) -> torch.Tensor:
    """[count, HEAD_SIZE] float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HEAD_SIZE, dtype=torch.float64, generator=generator)


def turn(rope: RotaryEmbedding, x: torch.Tensor, position: int) -> torch.Tensor:
    """R(position) x, of [HEAD_SIZE]."""
    return rope(torch.tensor([position]), x[None], x[None])[0][0]


@every_rope
@given(seed=seeds, position=st.integers(0, MAX_POSITION - 1))
def test_a_rotation_keeps_norms(name: str, seed: int, position: int):
    """Of the vector and of each pair; YaRN's grow by attention_factor, and by nothing else."""
    rope, (x,) = ROPES[name], vectors(seed, 1)
    turned = turn(rope, x, position)
    norms = [torch.hypot(*y.chunk(2)) for y in (x, turned)]
    torch.testing.assert_close(norms[1], rope.attention_factor * norms[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(turned.norm(), rope.attention_factor * x.norm(), atol=0, rtol=1e-5)


@every_rope
@given(seed=seeds, query_at=halves, key_at=halves, shift=halves)
def test_the_score_depends_on_the_distance_alone(
    name: str, seed: int, query_at: int, key_at: int, shift: int
):
    """Query and key moved on by as many positions have the same product."""
    rope, (q, k) = ROPES[name], vectors(seed, 2)
    score = turn(rope, q, query_at) @ turn(rope, k, key_at)
    moved = turn(rope, q, query_at + shift) @ turn(rope, k, key_at + shift)
    assert abs(score - moved) < 1e-3 * q.norm() * k.norm()


@every_rope
@given(seed=seeds, a=halves, b=halves)
def test_angles_add_up(name: str, seed: int, a: int, b: int):
    """R(a) R(b) = R(a + b); YaRN's factor enters twice on the left and once on the right."""
    rope, (x,) = ROPES[name], vectors(seed, 1)
    once = turn(rope, x, a + b)
    torch.testing.assert_close(
        turn(rope, turn(rope, x, a), b), rope.attention_factor * once, **CLOSE
    )


@every_rope
@given(seed=seeds)
def test_position_0_is_the_identity(name: str, seed: int):
    """To the last bit; YaRN multiplies by attention_factor even there."""
    rope, (x,) = ROPES[name], vectors(seed, 1)
    factor = rope.cos_sin_cache[0, 0].double()
    assert factor.item() == pytest.approx(rope.attention_factor, rel=1e-7)
    assert torch.equal(turn(rope, x, 0), factor * x)


def test_only_yarn_changes_norms():
    """0.1 ln 4 + 1 is the paper's factor for a context four times as long."""
    factors = {name: rope.attention_factor for name, rope in ROPES.items()}
    assert factors.pop("yarn") == pytest.approx(1.138629, abs=1e-6)
    assert set(factors.values()) == {1.0}


@every_rope
def test_positions_are_told_apart(name: str):
    """The properties above hold of the identity as well; this one does not."""
    rope, (x,) = ROPES[name], vectors(0, 1)
    query, _ = rope(torch.arange(MAX_POSITION), x.repeat(MAX_POSITION, 1), x[None])
    distances = torch.cdist(query, query) + 1e9 * torch.eye(MAX_POSITION)
    assert distances.min() > 1e-3 * x.norm()


@given(factor=st.floats(1, 64), theta=st.floats(100, 1e6))
def test_ntk_divides_the_last_pair_by_the_factor_and_the_first_hardly(factor: float, theta: float):
    """Pair i by factor ** (2 (i + 1) / head_size): between no scaling and linear scaling."""
    inv_freq = NTKScalingRotaryEmbedding(HEAD_SIZE, 1, theta, factor)._compute_inv_freq()
    i = torch.arange(HEAD_SIZE // 2, dtype=torch.float64)
    expected = theta ** (-2 * i / HEAD_SIZE) * factor ** (-2 * (i + 1) / HEAD_SIZE)
    torch.testing.assert_close(inv_freq.double(), expected, atol=0, rtol=2e-6)
    plain = RotaryEmbedding(HEAD_SIZE, 1, theta)._compute_inv_freq()
    assert inv_freq[-1].item() == pytest.approx(plain[-1].item() / factor, rel=2e-6)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 100, 256, 5000])
def test_dynamic_has_transformers_frequencies_for_a_sequence_of_that_length(length: int):
    """And up to the trained length those of plain RoPE, to the last bit."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": THETA}
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=HEAD_SIZE,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    theirs, scale = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
    ours = DynamicNTKScalingRotaryEmbedding(HEAD_SIZE, length, THETA, 4.0, max_trained_positions=64)
    assert torch.equal(ours._compute_inv_freq(), theirs)
    assert scale == ours.attention_factor
    plain = RotaryEmbedding(HEAD_SIZE, length, THETA)._compute_inv_freq()
    assert torch.equal(theirs, plain) == (length <= 64)


@given(factor=st.floats(1, 64), max_position=st.integers(1, 1 << 20))
def test_the_engine_s_dynamic_is_plain_rope(factor: float, max_position: int):
    """Whatever the factor, for the engine tabulates no more positions than were trained."""
    rope = DynamicNTKScalingRotaryEmbedding(HEAD_SIZE, 1, 10000.0, factor, 1)
    rope.max_position_embeddings = rope.max_trained_positions = max_position
    plain = RotaryEmbedding(HEAD_SIZE, 1, 10000.0)
    torch.testing.assert_close(
        rope._compute_inv_freq(), plain._compute_inv_freq(), atol=0, rtol=1e-6
    )


TINY = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_with_rope_sees_distances_and_one_with_learned_positions_places(
    name: str, tmp_path: Path
):
    """A prompt that begins at position 20 has the logits of one that begins at 0 if positions are
    rotations, and others if each position has a vector of its own."""
    configs = {
        "llama": LlamaConfig(**TINY, hidden_size=32, intermediate_size=48),
        "gpt2": GPT2Config(**TINY, hidden_size=32, max_position_embeddings=64),
    }
    save_random_checkpoint(tmp_path, configs[name])
    model, (prompt,) = load(tmp_path, max_model_len=64), make_prompts([30])
    positions = torch.arange(30)
    with torch.no_grad():
        here, there = (
            model.compute_logits(model(prompt, positions + shift, [torch.empty(0)] * 2, [30]))
            for shift in (0, 20)
        )
    gap = (here - there).abs().max().item()
    assert gap < 1e-3 if name == "llama" else gap > 1
