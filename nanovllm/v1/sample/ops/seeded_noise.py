"""Random numbers as a function of (seed, position, token id), not of a generator's history.

Sampling from softmax(logits) by the Gumbel trick needs one number of noise per token of the
vocabulary: argmax(logits + noise) is distributed as wanted. Here that number is computed by
hashing:

    (seed, position)  --splitmix64-->  a row's key, two 32-bit words
    (key, token id)   --a 32-bit permutation-->  31 bits  ->  uniform in (0, 1)  ->  Gumbel noise

A seeded request therefore draws the same tokens alone, in any row of any batch, after a preemption,
on any device (the uniforms are equal bit for bit, the logarithms to the last place), and only the
candidates that top-k and top-p left need any noise. In torch on a CPU this is several times faster
than Tensor.exponential_.

Upstream: no counterpart. vLLM 0.23.0 keeps a torch.Generator per seeded request, fills one row of
exponential noise from each in a Python loop (v1/sample/ops/topk_topp_sampler.py, random_sample),
and rewinds the generator for every sample that is thrown away because its prompt was not finished
yet (v1/worker/gpu_model_runner.py). Same distribution; other tokens for the same seed.
Sources: splitmix64 (Steele, Lea, Flood 2014); the permutation is Wellons' `triple32` with the
second key word added in the middle.
"""

from __future__ import annotations

import torch

from nanovllm.triton_utils import tl, triton
from nanovllm.v1.sample.metadata import UNSEEDED

_GOLDEN_64 = 0x9E3779B97F4A7C15 - 2**64  # torch integers are signed; products wrap either way
_MIX_64 = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_MIX_32 = (0xED5AD4BB - 2**32, 0xAC4C1B51 - 2**32, 0x31848BAB)
# One float32 step under 2^-31: the largest hash rounds up to 2^31 and still gives less than 1.
_TO_UNIT = 2.0**-31 * (1 - 2.0**-24)


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The key of each row's noise.

    Args:
        seeds: [num_rows] int64, any value.
        positions: [num_rows] int64, the index of the token to be sampled.

    Returns:
        [num_rows, 2] int32: output number `position` of a splitmix64 that starts at hash(seed).
    """
    state = _mix64(seeds + _GOLDEN_64) + (positions + 1) * _GOLDEN_64
    return _mix64(state).view(torch.int32).view(-1, 2)


def uniform_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Uniform numbers strictly between 0 and 1.

    Args:
        keys: [num_rows, 2] int32, from row_keys.
        token_ids: [num_rows or 1, num_tokens] int32.

    Returns:
        [num_rows, num_tokens] float32. Small values are 2^-31 apart: a token of probability 1e-8
        still gets its share (float32 from 24 random bits would round it to nothing or to 6e-8).
    """
    bits = token_ids ^ keys[:, :1]
    scratch = torch.empty_like(bits)
    _xorshift_(bits, 17, scratch).mul_(_MIX_32[0])
    _xorshift_(bits, 11, scratch).mul_(_MIX_32[1]).add_(keys[:, 1:])
    _xorshift_(bits, 15, scratch).mul_(_MIX_32[2])
    _xorshift_(bits, 14, scratch).bitwise_and_(2**31 - 1)
    return bits.to(torch.float32).add_(0.5).mul_(_TO_UNIT)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise -log(-log(1 - u)), always finite; arguments as for uniform_noise.

    -log(1 - u) is the exponential variable that upstream divides probabilities by: argmax(p / e)
    and argmax(log p - log e) are the same token. 1 - u, because the winner is a small exponential
    and floating point is finest near u = 0.
    """
    exponential = uniform_noise(keys, token_ids).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _mix64(z: torch.Tensor) -> torch.Tensor:
    """splitmix64's output function: a bijection of 64 bits in which every input bit flips half of
    the output bits."""
    z = (z ^ _shift_right_64(z, 30)) * _MIX_64[0]
    z = (z ^ _shift_right_64(z, 27)) * _MIX_64[1]
    return z ^ _shift_right_64(z, 31)


def _shift_right_64(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's copies the sign bit, the mask takes it out again."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _xorshift_(x: torch.Tensor, bits: int, scratch: torch.Tensor) -> torch.Tensor:
    """x ^= x >> bits (logical, 32 bits), in place and without a new tensor."""
    torch.bitwise_right_shift(x, bits, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))


# ---- the same inside Triton kernels, where unsigned integers wrap and shift as wanted ----


def step_keys(
    fresh_seeds: torch.Tensor, seeds: torch.Tensor | None, positions: torch.Tensor | None
) -> torch.Tensor:
    """row_keys of a step's rows in one kernel.

    Args:
        fresh_seeds: [num_rows] int64, for the rows without a seed of their own, at position 0.
        seeds: [num_rows] int64, UNSEEDED where a row has none; None: no row has one.
        positions: [num_rows] int64, read if `seeds` is given.

    Returns:
        [num_rows, 2] int32.
    """
    num_rows = fresh_seeds.shape[0]
    keys = fresh_seeds.new_empty((num_rows, 2), dtype=torch.int32)
    block = 128
    _step_keys_kernel[(triton.cdiv(num_rows, block),)](
        fresh_seeds, seeds, positions, keys.view(torch.int64), num_rows, UNSEEDED, block
    )
    return keys


@triton.jit
def _step_keys_kernel(
    fresh_seeds_ptr,
    seeds_ptr,
    positions_ptr,
    keys_ptr,
    num_rows,
    UNSEEDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    seeds = tl.load(fresh_seeds_ptr + rows, mask=mask, other=0)
    positions = tl.zeros([BLOCK], dtype=tl.int64)
    if seeds_ptr is not None:
        own = tl.load(seeds_ptr + rows, mask=mask, other=0)
        own_positions = tl.load(positions_ptr + rows, mask=mask, other=0)
        positions = tl.where(own == UNSEEDED, positions, own_positions)
        seeds = tl.where(own == UNSEEDED, seeds, own)
    state = _mix64_kernel(seeds.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    state += (positions + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    # A 64-bit key in memory is its low word and then its high word.
    tl.store(keys_ptr + rows, _mix64_kernel(state).to(tl.int64, bitcast=True), mask=mask)


@triton.jit
def _mix64_kernel(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def gumbel_noise_kernel(key_low, key_high, token_ids, APPROX_LOG: tl.constexpr):
    """gumbel_noise of int32 token ids of one row, whose key is given as two int32 scalars."""
    bits = (token_ids ^ key_low).to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 17)) * 0xED5AD4BB
    bits = (bits ^ (bits >> 11)) * 0xAC4C1B51 + key_high.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 15)) * 0x31848BAB
    bits = (bits ^ (bits >> 14)) & 0x7FFFFFFF
    # As in uniform_noise: the constant is _TO_UNIT.
    u = (bits.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 4.6566125955216364e-10
    # There is no log1p here. -log(1 - u) is its series where u is small (the next term would be
    # less than a float32 step), and where u is large 1 - u loses nothing that matters.
    series = u * (1.0 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    exponential = tl.where(u < 0.03125, series, -0.6931471805599453 * _log2(1.0 - u, APPROX_LOG))
    return -0.6931471805599453 * _log2(exponential, APPROX_LOG)


@triton.jit
def _log2(x, APPROX: tl.constexpr):
    """A GPU has an instruction for it, good to 22 bits; Triton's own log2 takes about twenty."""
    if APPROX:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)
