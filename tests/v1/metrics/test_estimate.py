"""Every formula that is shown comes to the result that stands beside it."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.v1.metrics.estimate import Estimate, evaluate, fill, show
from nanovllm.v1.metrics.hardware import HARDWARE
from nanovllm.v1.metrics.perf import PUBLISHED, RECOMPUTE, ModelShape


def assert_formulas_hold(estimate: Estimate) -> None:
    for section in estimate.sections:
        assert section.lines
        for line in section.lines:
            result = evaluate(line.formula, section.symbols)
            assert line.value == pytest.approx(result, rel=1e-9), (section.key, line)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("dtype", [None, "float32", "fp8", "int4"])
@pytest.mark.parametrize("name", [*PUBLISHED])
def test_formulas_come_to_their_results(name: str, dtype: str | None, recompute: str) -> None:
    assert_formulas_hold(
        Estimate(
            PUBLISHED[name],
            HARDWARE["h200"],
            batch_size=3,
            prompt_len=100,
            context_len=777,
            dtype=dtype,
            kv_cache_dtype="fp8" if dtype == "fp8" else None,
            training=True,
            recompute=recompute,
        )
    )


shapes = st.builds(
    lambda group, d, kv, **sizes: ModelShape(
        name="drawn", num_attention_heads=group * kv, num_key_value_heads=kv, head_dim=d, **sizes
    ),
    group=st.integers(1, 4),
    kv=st.integers(1, 4),
    d=st.sampled_from([8, 16, 64]),
    num_hidden_layers=st.integers(1, 5),
    hidden_size=st.integers(1, 150).map(lambda n: 2 * n),
    intermediate_size=st.integers(1, 300),
    vocab_size=st.integers(1, 1000),
    max_position_embeddings=st.integers(1, 300),
    tie_word_embeddings=st.booleans(),
    gated_mlp=st.booleans(),
    qkv_bias=st.booleans(),
    o_bias=st.booleans(),
    mlp_bias=st.booleans(),
    norm_bias=st.booleans(),
    qk_norm=st.booleans(),
    learned_positions=st.booleans(),
)


@given(shapes, st.integers(1, 9), st.integers(1, 300))
def test_formulas_hold_for_shapes_of_every_kind(shape: ModelShape, batch: int, n: int) -> None:
    device = HARDWARE["rtx4090"]
    assert_formulas_hold(Estimate(shape, device, batch, n, training=True))


def test_a_formula_is_shown_with_the_numbers_it_is_evaluated_with() -> None:
    symbols = {"L": 28, "kv": 8, "share": 0.5, "huge": 3.14159e23}
    assert fill("2 × L × (kv + 1200)", symbols) == "2 × 28 × (8 + 1200)"
    assert fill("huge × share", symbols) == "3.142e+23 × 0.5"
    assert evaluate("2 × L × (kv + 1200)", symbols) == 2 * 28 * 1208
    assert evaluate("huge × share", symbols) == 3.14159e23 / 2


def test_it_survives_json_and_says_the_same() -> None:
    estimate = Estimate(PUBLISHED["qwen3-0.6b"], HARDWARE["h100"], batch_size=8)
    data = json.loads(json.dumps(estimate.to_dict()))
    assert data["sections"]["parameters"]["total"] == 596_049_920
    assert data["sections"]["kv_cache"]["a token"] == 114_688
    assert next(iter(data["hardware"])) == "h100"
    seconds = sum(kernel["seconds"] for kernel in data["roofline"]["decode"])
    assert data["hardware"]["h100"]["decode_tokens_per_s"] == pytest.approx(8 / seconds)
    capacity = data["hardware"]["h100"]["kv_cache"]["num_tokens"]
    assert capacity == estimate.section("kv_cache").symbols["tokens"]


def test_a_model_too_large_is_said_not_to_fit() -> None:
    note = Estimate(PUBLISHED["gpt3-175b"], HARDWARE["h200"]).section("kv_cache").note
    assert re.match(r"The model does not fit: [\d.]+ GiB too much", note)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (596_049_920, "params", "596 M"),
        (6_738_415_616, "params", "6.738 B"),
        (327_680, "bytes", "320 KiB"),
        (13_476_831_232, "traffic", "13.48 GB"),
        (3.1428e23, "FLOP", "3.143e+23 FLOP"),
        (4.2e19, "FLOP", "42 EFLOP"),
        (0.0006872, "s", "687.2 µs"),
        (90_000, "s", "1.042 days"),
        (74_075, "count", "74,075"),
        (3357.2, "tok/s", "3.357 ktok/s"),
        (12, "", "12"),
    ],
)
def test_numbers_are_shown_with_four_digits_and_a_unit(value: float, unit: str, text: str) -> None:
    assert show(value, unit) == text
