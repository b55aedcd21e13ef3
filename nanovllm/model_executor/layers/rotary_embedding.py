"""Rotary position embedding (RoPE) and the ways to stretch it over longer contexts.

Each head is cut in half and read as head_size / 2 pairs (x1, x2), component i of the first half
with component i of the second. At position p pair i is turned by the angle p * inv_freq[i], so the
product of a turned query and a turned key depends on the distance between their positions only.

    inv_freq[i] = theta ** (-2 i / head_size)       1 for the first pair, tiny for the last

A model is stretched by lowering frequencies: all of them alike (linear), the slower the more (ntk,
dynamic), or only those too slow to have turned once within the trained context (llama3, yarn).

The same rotation as a product of complex numbers, the older encodings that are added to embeddings,
and plots of all of them are in nanovllm/lab/positions.py.

Upstream: vllm/model_executor/layers/rotary_embedding/ (0.23.0), a package with a file a variant.
Left out: longrope, mrope, partial rotation and the `mixed_b` of ntk (all refused by name), the
interleaved ("GPT-J") pairing, fused kernels. Upstream keeps the modules in a global dict so that
layers share one; here the model makes one and hands it to its layers. YaRN reads
`attention_factor`, `mscale` and `mscale_all_dim` as transformers does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from nanovllm.exceptions import VLLMValidationError


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by their positions.

    Args:
        head_size: width of one head; all of it is rotated.
        max_position_embeddings: positions to tabulate, from 0.
        base: theta.

    `cos_sin_cache` is [max_position, head_size], cosines then sines, always in float32: in bfloat16
    the angles of neighbouring far positions would fall together. It is made on the CPU, as in
    transformers, so that it is the same table on every device.
    """

    cos_sin_cache: torch.Tensor
    attention_factor = 1.0  # what cosines and sines are multiplied by; only YaRN changes it

    def __init__(self, head_size: int, max_position_embeddings: int, base: float) -> None:
        super().__init__()
        self.head_size = head_size
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache(), persistent=False)

    def _compute_inv_freq(self) -> torch.Tensor:
        """[head_size / 2] float32: radians a position."""
        return 1.0 / self._pos_freqs(self.base)

    def _pos_freqs(self, base: float) -> torch.Tensor:
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float, device="cpu")
        return base ** (exponents / self.head_size)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        positions = torch.arange(self.max_position_embeddings, dtype=torch.float, device="cpu")
        angles = positions[:, None] * self._compute_inv_freq()
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1) * self.attention_factor
        return cache.to(torch.get_default_device())

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both rotated, in new tensors.

        positions [num_tokens] int64, query [num_tokens, num_heads * head_size],
        key [num_tokens, num_kv_heads * head_size].
        """
        # Rounded to the model's dtype before they are multiplied, as transformers does.
        cos_sin = self.cos_sin_cache[positions].to(query.dtype).unsqueeze(1)
        cos, sin = cos_sin.chunk(2, dim=-1)  # [num_tokens, 1, head_size / 2] each
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.unflatten(-1, (-1, self.head_size)).chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(1)


class LinearScalingRotaryEmbedding(RotaryEmbedding):
    """Position interpolation: every frequency divided by `scaling_factor`.

    Source: Chen et al. 2023, arXiv:2306.15595.
    """

    def __init__(
        self, head_size: int, max_position_embeddings: int, base: float, scaling_factor: float
    ) -> None:
        self.scaling_factor = scaling_factor
        super().__init__(head_size, max_position_embeddings, base)

    def _compute_inv_freq(self) -> torch.Tensor:
        return super()._compute_inv_freq() / self.scaling_factor


class NTKScalingRotaryEmbedding(RotaryEmbedding):
    """NTK-aware scaling with a fixed factor: pair i is divided by scaling_factor ** (2 (i + 1) /
    head_size), so the last pair by scaling_factor, as linear scaling would, and the first hardly.
    Neighbouring positions stay as easy to tell apart as in training.

    Most of the power lies in a larger base; the division puts the last pair where it belongs.
    transformers does not know the type, so upstream's formula is the definition.

    Source: Su 2023, kexue.fm/archives/9706.
    """

    def __init__(
        self, head_size: int, max_position_embeddings: int, base: float, scaling_factor: float
    ) -> None:
        self.scaling_factor = scaling_factor
        super().__init__(head_size, max_position_embeddings, base)

    def _compute_inv_freq(self) -> torch.Tensor:
        inv_freq = 1.0 / self._pos_freqs(self.base * self.scaling_factor)
        return inv_freq / self.scaling_factor ** (2 / self.head_size)


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    """NTK-aware scaling that follows the length of the sequence: none as long as it fits into the
    trained context, then a base that grows with it.

        base * (scaling_factor * length / max_trained_positions - (scaling_factor - 1))
             ** (head_size / (head_size - 2))

    The first pair keeps its frequency, the last is divided by the bracket. `length` is
    `max_position_embeddings`, so one module is right for one length. That is enough for the engine,
    which admits no sequence beyond the trained context: up to there the bracket is 1, and this is
    plain RoPE. Beyond, transformers makes a new table at every length, while keys in the cache have
    been turned by older ones; a position has no one angle then.

    Args:
        max_trained_positions: the context length that the model was trained with.

    Source: bloc97 and emozilla 2023, as told in Peng et al., arXiv:2309.00071, appendix B.
    """

    def __init__(
        self,
        head_size: int,
        max_position_embeddings: int,
        base: float,
        scaling_factor: float,
        max_trained_positions: int,
    ) -> None:
        self.scaling_factor = scaling_factor
        self.max_trained_positions = max_trained_positions
        super().__init__(head_size, max_position_embeddings, base)

    def _compute_inv_freq(self) -> torch.Tensor:
        length = max(self.max_position_embeddings, self.max_trained_positions)
        stretch = self.scaling_factor * length / self.max_trained_positions
        stretch -= self.scaling_factor - 1
        base = self.base * stretch ** (self.head_size / (self.head_size - 2))
        return 1.0 / self._pos_freqs(base)


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Llama 3.1's rule, by how often a pair turns within the original context:

        more than high_freq_factor times    keep the frequency
        less than low_freq_factor times     divide it by scaling_factor
        in between                          mix the two linearly

    Source: Llama 3.1's reference code.
    """

    def __init__(
        self,
        head_size: int,
        max_position_embeddings: int,
        base: float,
        scaling_factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        orig_max_position: int,
    ) -> None:
        self.scaling_factor = scaling_factor
        self.low_freq_factor = low_freq_factor
        self.high_freq_factor = high_freq_factor
        self.orig_max_position = orig_max_position
        super().__init__(head_size, max_position_embeddings, base)

    def _compute_inv_freq(self) -> torch.Tensor:
        inv_freq = super()._compute_inv_freq()
        turns = self.orig_max_position / (2 * math.pi / inv_freq)
        span = self.high_freq_factor - self.low_freq_factor
        keep = (turns - self.low_freq_factor) / span if span else torch.zeros_like(turns)
        mixed = (1 - keep) * inv_freq / self.scaling_factor + keep * inv_freq
        slow, fast = turns < self.low_freq_factor, turns > self.high_freq_factor
        return torch.where(fast, inv_freq, torch.where(slow, inv_freq / self.scaling_factor, mixed))


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    """YaRN: fast pairs keep their frequency, slow ones are divided by `scaling_factor`, a ramp over
    the pair's index lies between; and cosines and sines grow by `attention_factor`, which sharpens
    the softmax that longer contexts would flatten.

    Args:
        orig_max_position: the context length that the model was trained with.
        beta_fast, beta_slow: turns within that context at which the ramp begins and ends.
        attention_factor: 0.1 ln(scaling_factor) + 1 in the paper.
        truncate: round the ramp's ends outwards to whole indices.

    Source: Peng et al. 2023, arXiv:2309.00071.
    """

    def __init__(
        self,
        head_size: int,
        max_position_embeddings: int,
        base: float,
        scaling_factor: float,
        orig_max_position: int,
        *,
        attention_factor: float,
        beta_fast: float = 32,
        beta_slow: float = 1,
        truncate: bool = True,
    ) -> None:
        self.scaling_factor = scaling_factor
        self.orig_max_position = orig_max_position
        self.attention_factor = attention_factor
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.truncate = truncate
        super().__init__(head_size, max_position_embeddings, base)

    def _find_correction_dim(self, num_rotations: float) -> float:
        """The (fractional) pair index that turns `num_rotations` times in the original context."""
        turns_of_first_pair = self.orig_max_position / (num_rotations * 2 * math.pi)
        return (self.head_size * math.log(turns_of_first_pair)) / (2 * math.log(self.base))

    def _compute_inv_freq(self) -> torch.Tensor:
        low = self._find_correction_dim(self.beta_fast)
        high = self._find_correction_dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.head_size - 1)
        if low == high:
            high += 0.001  # a ramp of no width would divide by zero
        index = torch.arange(self.head_size // 2, dtype=torch.float, device="cpu")
        keep = 1 - ((index - low) / (high - low)).clamp(0, 1)
        pos_freqs = self._pos_freqs(self.base)
        return 1.0 / (self.scaling_factor * pos_freqs) * (1 - keep) + 1.0 / pos_freqs * keep


def yarn_get_mscale(scale: float, mscale: float = 1.0) -> float:
    """How much YaRN magnifies queries and keys for a context stretched by `scale`."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


# What each type may have in config.json beside rope_type and rope_theta. A key that is not listed
# might change the result, so it is refused. "finetuned" is a remark, and the default and linear
# types ignore the original length.
_ORIGINAL = "original_max_position_embeddings"
_ROPE_KEYS: dict[str, set[str]] = {
    "default": {"factor", _ORIGINAL, "finetuned"},
    "linear": {"factor", _ORIGINAL, "finetuned"},
    "ntk": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        _ORIGINAL,
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "beta_fast",
        "beta_slow",
        "truncate",
        "finetuned",
    },
}


def get_rope(head_size: int, max_position: int, rope_parameters: dict[str, Any]) -> RotaryEmbedding:
    """The RoPE that a config asks for.

    Args:
        head_size: width of one head, even.
        max_position: positions to tabulate; no more than the model was trained with if the type is
            "dynamic", which ModelConfig.max_model_len sees to.
        rope_parameters: what `nanovllm.config.get_rope_parameters` returns.

    Raises:
        VLLMValidationError: a type or key that is not supported, or a value missing.
    """
    rope = dict(rope_parameters)
    rope_type, base = rope.pop("rope_type"), rope.pop("rope_theta")
    if rope_type not in _ROPE_KEYS:
        raise VLLMValidationError(
            f"RoPE type {rope_type!r} is not supported; supported are {', '.join(_ROPE_KEYS)}.",
            parameter="rope_type",
            value=rope_type,
        )
    if rope.get("partial_rotary_factor") == 1:
        rope.pop("partial_rotary_factor")
    if unknown := sorted(set(rope) - _ROPE_KEYS[rope_type]):
        raise VLLMValidationError(
            f"RoPE type {rope_type!r} with {unknown[0]}={rope[unknown[0]]!r} is not supported.",
            parameter=unknown[0],
            value=rope[unknown[0]],
        )
    if head_size % 2:
        raise VLLMValidationError(
            f"RoPE turns pairs, so the head size must be even, but it is {head_size}.",
            parameter="head_dim",
            value=head_size,
        )
    try:
        return _make_rope(rope_type, head_size, max_position, base, rope)
    except KeyError as e:
        raise VLLMValidationError(
            f"RoPE type {rope_type!r} needs {e.args[0]}, which config.json does not state.",
            parameter=e.args[0],
        ) from e


def _make_rope(
    rope_type: str, head_size: int, max_position: int, base: float, rope: dict[str, Any]
) -> RotaryEmbedding:
    if rope_type == "default":
        return RotaryEmbedding(head_size, max_position, base)
    factor = rope["factor"]
    if rope_type == "linear":
        return LinearScalingRotaryEmbedding(head_size, max_position, base, factor)
    if rope_type == "ntk":
        return NTKScalingRotaryEmbedding(head_size, max_position, base, factor)
    if rope_type == "dynamic":
        return DynamicNTKScalingRotaryEmbedding(
            head_size, max_position, base, factor, max_trained_positions=max_position
        )
    if rope_type == "llama3":
        return Llama3RotaryEmbedding(
            head_size,
            max_position,
            base,
            factor,
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope[_ORIGINAL],
        )
    attention_factor = rope.get("attention_factor", yarn_get_mscale(factor))
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if "attention_factor" not in rope and mscale and mscale_all_dim:
        attention_factor = yarn_get_mscale(factor, mscale) / yarn_get_mscale(factor, mscale_all_dim)
    return YaRNScalingRotaryEmbedding(
        head_size,
        max_position,
        base,
        factor,
        rope[_ORIGINAL],
        attention_factor=attention_factor,
        beta_fast=rope.get("beta_fast", 32),
        beta_slow=rope.get("beta_slow", 1),
        truncate=rope.get("truncate", True),
    )
