"""Formulas against torch, derivatives against autograd, and the counts against counting by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from nanovllm import LLM
from nanovllm.lab import activations as lab
from nanovllm.model_executor.layers.activation import SiluAndMul, get_act_fn

X = torch.cat(
    [
        torch.linspace(-30, 30, 6001, dtype=torch.float64),
        torch.tensor([-1e3, -1e-9, 0.0, 1e-9, 1e3], dtype=torch.float64),
    ]
)
every_function = pytest.mark.parametrize("name", lab.ACTIVATIONS)


@every_function
def test_a_formula_is_the_engine_s_function(name: str):
    """In float64, over both tails."""
    torch.testing.assert_close(
        lab.ACTIVATIONS[name].function(X), get_act_fn(name)(X), atol=1e-14, rtol=1e-12
    )


@every_function
def test_a_derivative_is_autograd_s(name: str):
    """Of the engine's function, not of the formula, so that an error in both would show."""
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(get_act_fn(name)(x).sum(), x)
    torch.testing.assert_close(
        lab.ACTIVATIONS[name].derivative(X), expected, atol=1e-13, rtol=1e-10
    )


def test_the_gate_s_derivatives_are_autograd_s():
    """Of SiluAndMul, by each of its halves."""
    x = 3 * torch.randn(4, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    (expected,) = torch.autograd.grad(SiluAndMul()(x).sum(), x)
    ours = torch.cat(lab.silu_and_mul_derivatives(*x.detach().chunk(2, dim=-1)), dim=-1)
    torch.testing.assert_close(ours, expected, atol=1e-14, rtol=1e-12)


def test_shapes_are_those_of_the_textbook():
    """Where each is flat: by the formulas solved by hand, or by bisection with torch's autograd."""
    shapes = {name: lab.shape(activation) for name, activation in lab.ACTIVATIONS.items()}
    # s (1 - s) = 0.01 and 1 - t^2 = 0.01
    root = (1 + math.sqrt(1 - 4 * lab.FLAT)) / 2
    assert shapes["sigmoid"].flat_above == pytest.approx(math.log(root / (1 - root)), abs=1e-3)
    assert shapes["tanh"].flat_above == pytest.approx(math.atanh(math.sqrt(0.99)), abs=1e-3)
    for name in ("sigmoid", "tanh"):
        assert shapes[name].flat_below == -shapes[name].flat_above
    for name in ("relu", "gelu", "silu"):
        assert shapes[name].flat_above == math.inf
    assert shapes["relu"].flat_below == pytest.approx(0, abs=1e-3)
    assert shapes["silu"].minimum == pytest.approx(-0.278465, abs=1e-6)
    assert shapes["silu"].minimum_at == pytest.approx(-1.278465, abs=1e-3)
    assert shapes["gelu"].minimum == pytest.approx(-0.169971, abs=1e-6)
    assert shapes["sigmoid"].steepest == 0.25
    for name in ("gelu", "gelu_pytorch_tanh", "silu"):
        edge = torch.tensor([shapes[name].flat_below], dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(get_act_fn(name)(edge).sum(), edge)
        assert abs(slope.item()) == pytest.approx(lab.FLAT, abs=1e-4)


def test_counts_by_hand():
    """Two tokens, three hidden units: the second unit is shut at both."""
    act_fn = lab.MeasuredActAndMul("relu")
    hidden = act_fn(
        torch.tensor([[10.0, -1.0, 0.05, 1.0, 5.0, 1.0], [0.3, -2.0, 2.0, 1.0, 1.0, -1.0]])
    )
    assert hidden.tolist() == [[10.0, 0.0, pytest.approx(0.05)], [pytest.approx(0.3), 0.0, -2.0]]
    counts = act_fn.counts
    assert (counts.num_tokens, counts.width) == (2, 3)
    assert counts.zeros == counts.saturated == 2
    assert counts.shut == counts.near_zero == 3  # and 0.05, beside 10
    assert counts.dead == 1
    act_fn(torch.tensor([[0.1, 5.0, 0.0, 1.0, 1.0, 1.0]]))
    assert (counts.num_tokens, counts.dead) == (3, 0)


def test_counts_over_pieces_are_counts_over_all():
    """However the engine cuts the text into steps."""
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    whole, pieces = lab.MeasuredActAndMul("gelu"), lab.MeasuredActAndMul("gelu")
    whole(x)
    for piece in x.split([1, 7, 32]):
        pieces(piece)
    for field in ("num_tokens", "width", "zeros", "saturated", "shut", "near_zero", "dead"):
        assert getattr(whole.counts, field) == getattr(pieces.counts, field)
    assert whole.counts.near_zero > 0


def test_the_model_has_its_own_activation_again_afterwards():
    """Also after an error; and a model without a gate is refused."""
    mlp = nn.Module()
    mlp.act_fn = original = SiluAndMul()
    model = nn.ModuleList([mlp])

    def fail() -> None:
        with lab.activation_replaced(model, "relu") as measured:
            assert model[0].act_fn is measured[0]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert mlp.act_fn is original
    with pytest.raises(ValueError, match="no gated MLP"), lab.activation_replaced(original, "relu"):
        pass


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The embedded model."""
    return LLM(device="cpu", max_model_len=256, enforce_eager=True, enable_prefix_caching=False)


def test_prompts_are_cut_and_counted(llm: LLM, tmp_path: Path):
    """Stories one by one, a plain text in windows, and no more tokens than asked for."""
    stories = lab.read_prompts(llm, lab.HELD_OUT, 500, window=200)
    assert sum(map(len, stories)) == 500
    assert max(map(len, stories)) <= 200
    (tmp_path / "text.txt").write_text("The little dog ran to the park. " * 20)
    windows = lab.read_prompts(llm, tmp_path / "text.txt", 10_000, window=50)
    assert [len(w) for w in windows[:-1]] == [50] * (len(windows) - 1)
    text = llm.get_tokenizer().decode([token for w in windows for token in w])
    assert text == "The little dog ran to the park. " * 20


def test_the_activation_that_was_trained_is_the_best(llm: LLM):
    """silu in silu's place changes nothing; relu, which shuts what silu lets pass, costs most."""
    prompts = lab.read_prompts(llm, lab.HELD_OUT, 600, window=200)
    silu, gelu, relu, again = (
        lab.measure(llm, prompts, name) for name in ("silu", "gelu", "relu", "silu")
    )
    assert silu.perplexity == again.perplexity
    assert silu.next_tokens == again.next_tokens
    assert silu.perplexity < gelu.perplexity < relu.perplexity
    assert len(silu.next_tokens) == 600 - len(prompts)
    assert silu.share("zeros") == 0
    assert relu.share("zeros") == relu.share("saturated") > 0.5
    assert silu.share("near_zero") < gelu.share("near_zero") < relu.share("near_zero")
    for m in (silu, gelu, relu):
        assert [layer.num_tokens for layer in m.layers] == [600] * 7


def test_perplexity_is_that_of_the_prompt_logprobs(llm: LLM):
    """Measured as the model is, and through torch's cross entropy on the model's logits."""
    from transformers import AutoModelForCausalLM

    prompts = lab.read_prompts(llm, lab.HELD_OUT, 150, window=100)
    folder = lab.HELD_OUT.parent
    hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses, best = [], []
    with torch.no_grad():
        for prompt in prompts:
            logits = hf_model(torch.tensor([prompt])).logits[0, :-1]
            losses.append(
                nn.functional.cross_entropy(logits, torch.tensor(prompt[1:]), reduction="none")
            )
            best.extend(logits.argmax(dim=-1).tolist())
    measured = lab.measure(llm, prompts, "silu")
    assert measured.perplexity == pytest.approx(torch.cat(losses).mean().exp().item(), rel=1e-4)
    assert measured.next_tokens == best


def test_the_command_prints_both_tables_and_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A PNG is written where matplotlib is installed."""
    pytest.importorskip("matplotlib")
    png = tmp_path / "activations.png"
    lab.main(["--num-tokens", "100", "--png", str(png)])
    out = capsys.readouterr().out
    assert all(name in out for name in lab.ACTIVATIONS)
    assert "tiny-stories on 100 tokens of heldout.txt" in out
    assert png.read_bytes().startswith(b"\x89PNG")
