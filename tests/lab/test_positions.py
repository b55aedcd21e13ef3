"""The older position encodings, RoPE in Euler's form, and what is plotted of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.lab import positions as lab
from nanovllm.model_executor.layers.rotary_embedding import RotaryEmbedding

ROPES = lab.encodings(head_size=16, trained=256, factor=4)
positions = st.integers(0, 1023)


def test_sinusoidal_is_the_formula_of_the_paper():
    """Sines in the even columns, cosines in the odd ones, each entry by itself."""
    table = lab.sinusoidal_embedding(50, 12)
    for p in range(50):
        for i in range(6):
            angle = p / 10000 ** (2 * i / 12)
            assert table[p, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert table[p, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


@given(a=st.integers(0, 511), b=st.integers(0, 511), shift=st.integers(0, 511))
def test_the_product_of_two_sinusoidal_vectors_depends_on_their_distance_alone(
    a: int, b: int, shift: int
):
    """Both shifted by as much, they have the same product."""
    table = lab.sinusoidal_embedding(1024, 16).double()
    moved = table[a + shift] @ table[b + shift]
    assert moved.item() == pytest.approx((table[a] @ table[b]).item(), abs=2e-3)


@given(a=st.integers(0, 511), k=st.integers(0, 511))
def test_a_sinusoidal_vector_moves_by_turning(a: int, k: int):
    """That of a + k is that of a, (cos, sin) taken as pairs, rotated by k as RoPE rotates."""
    table = lab.sinusoidal_embedding(1024, 16)
    rope = RotaryEmbedding(16, 1024, 10000.0)
    sin, cos = table[a][0::2], table[a][1::2]
    turned, _ = rope(torch.tensor([k]), torch.cat((cos, sin))[None], torch.zeros(1, 16))
    expected = torch.cat((table[a + k][1::2], table[a + k][0::2]))
    torch.testing.assert_close(turned[0], expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", ROPES)
@given(seed=st.integers(0, 2**31), p=positions)
def test_multiplying_by_e_to_the_i_angle_is_what_the_layer_does(name: str, seed: int, p: int):
    """Two heads at once; the layer's cosines and sines are larger by YaRN's attention_factor."""
    rope = ROPES[name]
    x = torch.randn(3, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    where = torch.tensor([p, 0, 1023 - p])
    by_layer, _ = rope(where, x.flatten(1), x.flatten(1))
    by_complex = lab.rotate_by_complex(x, where, rope._compute_inv_freq().double())
    torch.testing.assert_close(
        by_layer.unflatten(1, (2, 16)), rope.attention_factor * by_complex, atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("name", ROPES)
def test_the_score_of_a_vector_with_itself_is_a_mean_of_cosines(name: str):
    """One over the pairs, largest at distance 0; the bound lies above it."""
    rope = ROPES[name]
    angles = torch.arange(1024)[:, None].double() * rope._compute_inv_freq().double()
    scores = lab.score_by_distance(rope)
    expected = angles.cos().mean(dim=-1) * rope.attention_factor**2
    torch.testing.assert_close(scores.double(), expected, atol=2e-4, rtol=0)
    assert scores.argmax() == 0
    sums = torch.polar(torch.ones_like(angles), angles).cumsum(dim=-1).abs()
    torch.testing.assert_close(lab.score_bound(rope), sums.mean(dim=-1), atol=2e-3, rtol=0)


def test_a_sinusoidal_table_as_wide_as_the_head_scores_like_rope():
    """Same angles, same curve: only what is done with them differs."""
    scores = lab.scores({"rope": ROPES["theta 10,000"]}, hidden_size=16)
    torch.testing.assert_close(scores["rope"], scores[lab.SINUSOIDAL], atol=1e-5, rtol=0)


def test_octaves_hold_every_distance_once():
    """1, 2-3, 4-7 and what is left of the next; distance 0 is left out."""
    values = torch.tensor([100.0, 1, -2, 4, 5, 5, 5, 5, 7, 9])
    assert lab.mean_by_octave(values) == ([1, 2, 4, 8], [1, 3, 5, 8])


def test_the_command_prints_every_encoding_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A PNG is written where matplotlib is installed."""
    pytest.importorskip("matplotlib")
    png = tmp_path / "positions.png"
    lab.main(["--png", str(png), "--head-size", "16", "--trained", "64"])
    out = capsys.readouterr().out
    assert all(name in out for name in [*ROPES, lab.SINUSOIDAL])
    assert png.read_bytes().startswith(b"\x89PNG")
