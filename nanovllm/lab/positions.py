"""Positions, from absolute to rotary: how a transformer learns where a token stands.

Attention by itself sees a set: it gives the same whatever the order of the keys. Three ways to tell
it the order, oldest first:

    sinusoidal    sines and cosines of the position, added to      `sinusoidal_embedding`, here; no
                  the token's embedding                            model of the engine uses it
    learned       a trained vector a position, added likewise;     `GPT2Model.wpe`, models/gpt2.py
                  there is none beyond the trained length
    rotary        queries and keys turned by angles that grow      layers/rotary_embedding.py, for
                  with the position                                all models but GPT-2

What matters in the end is the score, query times key. Turned vectors' scores depend on the distance
of the positions alone. For the sinusoidal table the same holds of a product of two of its vectors,
but what is added to an embedding also meets the other token's content there.

`python -m nanovllm.lab.positions --png positions.png` prints and plots how scores fall with the
distance, for rotary encodings with two bases and every scaling, and for the sinusoidal table.

Sources: Vaswani et al. 2017, arXiv:1706.03762 (sinusoidal); Radford et al. 2019 (learned); Su et
al. 2021, arXiv:2104.09864 (rotary, and the bound).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from nanovllm.model_executor.layers.rotary_embedding import (
    DynamicNTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
    yarn_get_mscale,
)

HEAD_SIZE = 128
TRAINED = 2048  # positions
FACTOR = 4
SINUSOIDAL = "sinusoidal"  # its name in what is printed and plotted


def sinusoidal_embedding(
    max_position: int, hidden_size: int, base: float = 10000.0
) -> torch.Tensor:
    """The table that the first transformer added to its embeddings: [max_position, hidden_size].

        table[p, 2 i] = sin(p * base ** (-2 i / hidden_size)),  table[p, 2 i + 1] = cos(the same)

    These are RoPE's angles for a head as wide as the model, so RoPE's table is taken. The vector of
    position p + k is that of p with every pair turned by k's angles.
    """
    cos, sin = RotaryEmbedding(hidden_size, max_position, base).cos_sin_cache.chunk(2, dim=-1)
    return torch.stack((sin, cos), dim=-1).flatten(1)


def rotate_by_complex(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor
) -> torch.Tensor:
    """RoPE in Euler's form: pair (x1, x2) is the complex number x1 + i x2, and to turn it by an
    angle is to multiply it by e ** (i angle).

    x [num_tokens, num_heads, head_size], positions [num_tokens], inv_freq [head_size / 2] radians a
    position -> like x. That the score depends on the distance is now one line: with q and k one
    pair each, their product is the real part of q * conj(k), and

        (q e^(i m f)) * conj(k e^(i n f)) = q conj(k) e^(i (m - n) f)
    """
    angles = positions[:, None, None] * inv_freq
    z = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), dim=-1)


def score_by_distance(rope: RotaryEmbedding) -> torch.Tensor:
    """[max_position]: the score of a key at position 0 with the same vector, as query, at each
    position. The vector has length 1 and puts as much into one pair as into every other, so this is
    the mean over the pairs of cos(distance * inv_freq), times YaRN's attention_factor squared."""
    positions = torch.arange(rope.max_position_embeddings)
    same = torch.full((len(positions), rope.head_size), rope.head_size**-0.5)
    query, _ = rope(positions, same, same)
    return query @ query[0]


def score_bound(rope: RotaryEmbedding) -> torch.Tensor:
    """[max_position]: the mean over j of |sum of the first j pairs' e ** (i distance * inv_freq)|.

    A score is at most this times a constant of the query and the key, whatever they are: RoFormer's
    argument (section 3.4.3) that far tokens weigh less.
    """
    cos, sin = (rope.cos_sin_cache / rope.attention_factor).double().chunk(2, dim=-1)
    return torch.complex(cos, sin).cumsum(dim=-1).abs().mean(dim=-1)


def encodings(
    head_size: int = HEAD_SIZE, trained: int = TRAINED, factor: float = FACTOR
) -> dict[str, RotaryEmbedding]:
    """What is compared, each with factor * trained positions: RoPE with a small and a large base,
    and every way to stretch the small one from `trained` positions to all of them. "dynamic" has
    the table of a sequence of that length, and stretches by factor * factor - (factor - 1)."""
    size, n, base = head_size, int(factor * trained), 10000.0
    return {
        "theta 10,000": RotaryEmbedding(size, n, base),
        "theta 1,000,000": RotaryEmbedding(size, n, 1e6),
        "linear": LinearScalingRotaryEmbedding(size, n, base, factor),
        "ntk": NTKScalingRotaryEmbedding(size, n, base, factor),
        "dynamic": DynamicNTKScalingRotaryEmbedding(size, n, base, factor, trained),
        "llama3": Llama3RotaryEmbedding(size, n, base, factor, 1.0, 4.0, trained),
        "yarn": YaRNScalingRotaryEmbedding(
            size, n, base, factor, trained, attention_factor=yarn_get_mscale(factor)
        ),
    }


def scores(ropes: dict[str, RotaryEmbedding], hidden_size: int = 512) -> dict[str, torch.Tensor]:
    """Name -> score by distance, of `ropes` and of a sinusoidal table `hidden_size` wide (where it
    is the product of position 0's vector with each other, over that with itself)."""
    result = {name: score_by_distance(rope) for name, rope in ropes.items()}
    table = sinusoidal_embedding(max(map(len, result.values())), hidden_size)
    return result | {SINUSOIDAL: table @ table[0] / (table[0] @ table[0])}


def mean_by_octave(values: torch.Tensor) -> tuple[list[int], list[float]]:
    """Scores swing from one distance to the next; the mean of |value| over the distances 1, 2-3,
    4-7, 8-15 ... shows the trend: (first distance of each octave, means)."""
    firsts = [2**k for k in range((len(values) - 1).bit_length()) if 2**k < len(values)]
    return firsts, [values[first : 2 * first].abs().mean().item() for first in firsts]


def wavelength(rope: RotaryEmbedding) -> float:
    """Positions in which the slowest pair turns once."""
    return 2 * torch.pi / rope._compute_inv_freq()[-1].item()


def print_table(ropes: dict[str, RotaryEmbedding]) -> None:
    """Mean |score| for every encoding in every third octave, and in how many positions its slowest
    pair turns once."""
    from rich.console import Console
    from rich.table import Table

    title = "Mean |score| of a vector with itself over the distances d to 2 d - 1, d ="
    table = Table(title=title, title_justify="right")
    table.add_column("encoding", no_wrap=True)
    table.add_column("slowest pair", justify="right", no_wrap=True)
    columns = {name: mean_by_octave(values) for name, values in scores(ropes).items()}
    shown = [(i, first) for i, first in enumerate(next(iter(columns.values()))[0]) if i % 3 == 0]
    for _, first in shown:
        table.add_column(str(first), justify="right", no_wrap=True)
    for name, (_, means) in columns.items():
        wave = f"{wavelength(ropes[name]):,.0f}" if name in ropes else ""
        table.add_row(name, wave, *(f"{means[i]:.3f}" for i, _ in shown))
    Console().print(table)


def plot(ropes: dict[str, RotaryEmbedding], path: Path) -> None:
    """Write a PNG: scores by distance, near and far, and RoFormer's bound. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (near, far, bound) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for name, values in scores(ropes).items():
        style = {"linestyle": "--", "color": "black"} if name == SINUSOIDAL else {}
        near.plot(values[:65], label=name, **style)
        far.plot(*mean_by_octave(values), marker="o", markersize=3, label=name, **style)
    for name, rope in ropes.items():
        firsts, means = mean_by_octave(score_bound(rope))
        bound.plot(firsts, means, marker="o", markersize=3, label=name)
    near.set(title="score", xlabel="distance (tokens)")
    far.set(title="mean |score| over an octave", xlabel="distance (tokens)", xscale="log")
    bound.set(title="mean of RoFormer's bound over an octave", xscale="log")
    bound.set_xlabel("distance (tokens)")
    for axes in (near, far, bound):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=90, pil_kwargs={"optimize": True})
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """The command: a table, and a plot if a file for it is named."""
    parser = argparse.ArgumentParser(description="How scores fall with the distance of positions.")
    parser.add_argument("--png", type=Path, help="also plot to this file (needs matplotlib)")
    parser.add_argument("--head-size", type=int, default=HEAD_SIZE)
    parser.add_argument("--trained", type=int, default=TRAINED, help="positions before stretching")
    parser.add_argument("--factor", type=float, default=FACTOR, help="how far they are stretched")
    args = parser.parse_args(argv)
    ropes = encodings(args.head_size, args.trained, args.factor)
    print_table(ropes)
    if args.png is not None:
        plot(ropes, args.png)


if __name__ == "__main__":
    main()
