"""Activation functions: formulas, derivatives, and what each of them does inside a trained model.

Without a nonlinearity between them two matrices are one. The functions differ in where they let a
signal and its gradient through, which their derivatives say:

    sigmoid, tanh    flat on both sides: a large input learns nothing more (it has saturated)
    relu             flat on one side, exactly 0 there: such a unit costs nothing and learns nothing
    gelu, silu       relu rounded off: small inputs still pass a little, and a dip below zero
    SwiGLU           silu(gate) * up: one projection decides how much of another passes

The engine takes its functions from torch (layers/activation.py); the tests hold these formulas
against them, and the derivatives against autograd.

`python -m nanovllm.lab.activations` prints the functions side by side. It then reads a text with a
model of the engine (--model, the embedded one unless told otherwise) and counts, with the silu it
was trained with and with gelu and relu in its place: how many gates have saturated, how much of
what the MLPs pass on is next to nothing, and what the exchange costs. --png also plots.

Upstream: none.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.model_executor.layers.activation import SiluAndMul, get_act_fn

if TYPE_CHECKING:
    from nanovllm import LLM

Function = Callable[[torch.Tensor], torch.Tensor]

FLAT = 0.01  # a function is flat, an input saturated, where |derivative| is below this
NEAR_ZERO = 0.01  # of a token's largest |value|: below, a value is next to nothing
HELD_OUT = Path(__file__).parents[1] / "assets" / "tiny-stories" / "heldout.txt"


# ---- formulas, each followed by its derivative; any shape, any float dtype ----


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def sigmoid_derivative(x: torch.Tensor) -> torch.Tensor:
    return sigmoid(x) * (1 - sigmoid(x))


def tanh(x: torch.Tensor) -> torch.Tensor:
    """A sigmoid twice as steep, stretched to -1 .. 1."""
    return 2 * sigmoid(2 * x) - 1


def tanh_derivative(x: torch.Tensor) -> torch.Tensor:
    return 1 - tanh(x) ** 2


def relu(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0)


def relu_derivative(x: torch.Tensor) -> torch.Tensor:
    """There is none at 0; torch says 0, so this does."""
    return (x > 0).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x times the share of a standard normal distribution that lies below x."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_derivative(x: torch.Tensor) -> torch.Tensor:
    """That share, and x times the density."""
    share = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return share + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The share approximated by a tanh. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415."""
    return x * 0.5 * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_tanh_derivative(x: torch.Tensor) -> torch.Tensor:
    t = tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + t) + x * 0.5 * (1 - t**2) * inner


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)


def silu_derivative(x: torch.Tensor) -> torch.Tensor:
    return sigmoid(x) + x * sigmoid_derivative(x)


def silu_and_mul_derivatives(
    gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of silu(gate) * up, by gate and by up. Each is scaled by the other half: where the gate is
    shut, neither learns; where it is open, `up` learns as in a linear layer."""
    return silu_derivative(gate) * up, silu(gate)


@dataclass(frozen=True)
class Activation:
    function: Function
    derivative: Function


# transformers' names, as in config.json; `get_act_fn` knows them all.
ACTIVATIONS = {
    "sigmoid": Activation(sigmoid, sigmoid_derivative),
    "tanh": Activation(tanh, tanh_derivative),
    "relu": Activation(relu, relu_derivative),
    "gelu": Activation(gelu, gelu_derivative),
    "gelu_pytorch_tanh": Activation(gelu_tanh, gelu_tanh_derivative),
    "silu": Activation(silu, silu_derivative),
}
TRAINED_WITH = "silu"
COMPARED = (TRAINED_WITH, "gelu", "relu")


@dataclass
class Shape:
    """One function in numbers, found on a grid of -20 to 20 in steps of 0.001."""

    minimum: float
    minimum_at: float
    maximum: float
    steepest: float  # the largest derivative
    flat_below: float  # |derivative| < FLAT for every smaller input; -inf: nowhere
    flat_above: float  # likewise for larger ones; inf: nowhere


def shape(activation: Activation) -> Shape:
    """What the map of functions says about one."""
    x = torch.arange(-20_000, 20_001, dtype=torch.float64) / 1000
    y, slope = activation.function(x), activation.derivative(x)
    steep = (slope.abs() >= FLAT).nonzero().flatten()
    first, last = int(steep[0]), int(steep[-1])
    return Shape(
        minimum=y.min().item(),
        minimum_at=x[y.argmin()].item(),
        maximum=y.max().item(),
        steepest=slope.max().item(),
        flat_below=x[first].item() if first > 0 else -math.inf,
        flat_above=x[last].item() if last < len(x) - 1 else math.inf,
    )


# ---- inside a model ----


@dataclass
class LayerCounts:
    """What one MLP did on a text of `num_tokens` tokens; `width` hidden units each."""

    num_tokens: int = 0
    width: int = 0
    zeros: int = 0  # act(gate) exactly 0
    saturated: int = 0  # |act'(gate)| < FLAT
    shut: int = 0  # |act(gate)| < NEAR_ZERO of the token's largest
    near_zero: int = 0  # |act(gate) * up| < NEAR_ZERO of the token's largest
    used: torch.Tensor | None = None  # [width] bool: at some token not near zero

    @property
    def dead(self) -> int:
        """Hidden units that were near zero at every token."""
        return 0 if self.used is None else int((~self.used).sum())


class MeasuredActAndMul(nn.Module):
    """act(gate) * up in place of a model's SiluAndMul, counting as it goes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.act = get_act_fn(name)
        self.derivative = ACTIVATIONS[name].derivative
        self.counts = LayerCounts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 2 * d], gate first -> [num_tokens, d]"""
        gate, up = x.chunk(2, dim=-1)
        opened = self.act(gate)
        hidden = opened * up
        counts = self.counts
        counts.num_tokens += gate.shape[0]
        counts.width = gate.shape[1]
        counts.zeros += int((opened == 0).sum())
        counts.saturated += int((self.derivative(gate).abs() < FLAT).sum())
        counts.shut += int(near_zero(opened).sum())
        small = near_zero(hidden)
        counts.near_zero += int(small.sum())
        used = (~small).any(dim=0)
        counts.used = used if counts.used is None else counts.used | used
        return hidden


def near_zero(x: torch.Tensor) -> torch.Tensor:
    """[num_tokens, d] bool: below NEAR_ZERO of the token's own largest |value|. (Of the text's
    largest would say little: a first token's values can be a thousand times all others'.)"""
    return x.abs() < NEAR_ZERO * x.abs().amax(dim=-1, keepdim=True)


@dataclass
class Measurement:
    """A model with one activation function on one text."""

    activation: str
    layers: list[LayerCounts]
    perplexity: float
    next_tokens: list[int]  # the most likely one after each token

    def share(self, count: str) -> float:
        """A LayerCounts field over all tokens, hidden units and layers."""
        total = sum(layer.num_tokens * layer.width for layer in self.layers)
        return sum(getattr(layer, count) for layer in self.layers) / total

    def dead_share(self) -> float:
        """Of all layers' hidden units."""
        return sum(layer.dead for layer in self.layers) / sum(layer.width for layer in self.layers)


@contextmanager
def activation_replaced(model: nn.Module, name: str) -> Iterator[list[MeasuredActAndMul]]:
    """Within, every SwiGLU gate of `model` has the activation `name`; afterwards its own again.

    Raises:
        ValueError: the model has none.
    """
    mlps = [m for m in model.modules() if isinstance(getattr(m, "act_fn", None), SiluAndMul)]
    if not mlps:
        raise ValueError("the model has no gated MLP; choose a Llama, Mistral or Qwen.")
    originals = [mlp.act_fn for mlp in mlps]
    measured = [MeasuredActAndMul(name) for _ in mlps]
    try:
        for mlp, act_fn in zip(mlps, measured, strict=True):
            mlp.act_fn = act_fn
        yield measured
    finally:
        for mlp, original in zip(mlps, originals, strict=True):
            mlp.act_fn = original


def measure(llm: LLM, prompts: list[list[int]], name: str) -> Measurement:
    """Read `prompts` (token ids) with the activation `name` in every MLP.

    `llm` must run eagerly and without a prefix cache, which would hand the keys and values of one
    activation to the next.
    """
    from nanovllm import SamplingParams
    from nanovllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    model = llm.llm_engine.engine_core.engine_core.model_executor.model_runner.model
    with activation_replaced(model, name) as measured:
        tokens = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = llm.generate(tokens, params, use_tqdm=False)
    logprobs: list[float] = []
    next_tokens: list[int] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, row in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert row is not None
            logprobs.append(row[token].logprob)
            next_tokens.append(max(row, key=lambda candidate: row[candidate].logprob))
    return Measurement(
        name,
        [act_fn.counts for act_fn in measured],
        math.exp(-sum(logprobs) / len(logprobs)),
        next_tokens,
    )


def read_prompts(llm: LLM, path: Path, num_tokens: int, window: int = 512) -> list[list[int]]:
    """About `num_tokens` tokens of a text as prompts of at most `window`: a text file in pieces, or
    the stories of a file of JSON lines."""
    text = path.read_text(encoding="utf-8")
    is_stories = text.startswith("{")
    texts = [json.loads(line)["story"] for line in text.splitlines()] if is_stories else [text]
    tokenizer = llm.get_tokenizer()
    prompts: list[list[int]] = []
    for ids in (tokenizer.encode(text, add_special_tokens=False) for text in texts):
        for start in range(0, len(ids), window):
            left = num_tokens - sum(map(len, prompts))
            if left < 2:
                return prompts
            if len(piece := ids[start : start + min(window, left)]) >= 2:
                prompts.append(piece)
    return prompts


# ---- the command ----


def print_functions() -> None:
    """The map: one row a function."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Activation functions (flat: |derivative| < {FLAT})", title_justify="left")
    table.add_column("function", no_wrap=True)
    for column in ("least", "at", "most", "steepest", "flat <", "flat >"):
        table.add_column(column, justify="right")
    for name, activation in ACTIVATIONS.items():
        s = shape(activation)
        bounded = s.maximum < 2
        table.add_row(
            name,
            f"{s.minimum:.3f}",
            f"{s.minimum_at:.3f}" if s.minimum < 0 and not bounded else "",
            f"{s.maximum:.3f}" if bounded else "",
            f"{s.steepest:.3f}",
            f"{s.flat_below:.2f}" if s.flat_below > -math.inf else "",
            f"{s.flat_above:.2f}" if s.flat_above < math.inf else "",
        )
    Console().print(table)


def print_measurements(measurements: list[Measurement], title: str) -> None:
    """One row an activation function; the first is what the model was trained with.

    gate = 0    act(gate) is exactly 0
    saturated   |act'(gate)| < FLAT
    shut        |act(gate)| < NEAR_ZERO of the token's largest
    near 0      |act(gate) * up| likewise: what down_proj reads
    dead        hidden units near 0 at every token
    agree       positions at which the most likely next token is the first row's
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("act")
    for column in ("gate = 0", "saturated", "shut", "near 0", "dead", "perplexity", "agree"):
        table.add_column(column, justify="right")
    trained = measurements[0].next_tokens
    for m in measurements:
        same = sum(a == b for a, b in zip(m.next_tokens, trained, strict=True)) / len(trained)
        shares = [m.share(count) for count in ("zeros", "saturated", "shut", "near_zero")]
        cells = [f"{share:.1%}" for share in shares] + [f"{m.dead_share():.2%}"]
        table.add_row(m.activation, *cells, f"{m.perplexity:,.2f}", f"{same:.1%}")
    Console().print(table)


def plot(measurements: list[Measurement], path: Path) -> None:
    """Write a PNG: the functions, their derivatives, and near-zero shares by layer. Needs
    matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (values, slopes, layers) = plt.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    x = torch.linspace(-6, 6, 601, dtype=torch.float64)
    for name, activation in ACTIVATIONS.items():
        style = "--" if name == "gelu_pytorch_tanh" else "-"
        values.plot(x, activation.function(x), style, label=name)
        slopes.plot(x, activation.derivative(x), style, label=name)
    values.set(title="function", xlabel="input", ylim=(-1.2, 3))
    slopes.set(title="derivative", xlabel="input")
    for m in measurements:
        shares = [layer.near_zero / (layer.num_tokens * layer.width) for layer in m.layers]
        layers.plot(shares, marker="o", markersize=3, label=m.activation)
    layers.set(title="share of the MLP's hidden values near 0", xlabel="layer", ylim=(0, 1))
    for axes in (values, slopes, layers):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """The command: two tables, and a plot if a file for it is named."""
    parser = argparse.ArgumentParser(description="Activation functions, alone and in a model.")
    parser.add_argument("--model", default="tiny-stories", help="a checkpoint with gated MLPs")
    parser.add_argument("--text", type=Path, default=HELD_OUT, help="plain text or JSON lines")
    parser.add_argument("--num-tokens", type=int, default=4096, help="how much of it is read")
    parser.add_argument("--png", type=Path, help="also plot to this file (needs matplotlib)")
    args = parser.parse_args(argv)
    from nanovllm import LLM

    print_functions()
    llm = LLM(
        args.model,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    prompts = read_prompts(llm, args.text, args.num_tokens)
    measurements = [measure(llm, prompts, name) for name in COMPARED]
    title = f"{Path(args.model).name} on {sum(map(len, prompts))} tokens of {args.text.name}"
    print_measurements(measurements, title)
    if args.png is not None:
        plot(measurements, args.png)


if __name__ == "__main__":
    main()
