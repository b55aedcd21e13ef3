"""Greedy and random sampling of whole rows, each logit read once.

Sampling by the Gumbel trick is an argmax: of the logits, or of logits over temperature plus noise.
In torch that is a chain of passes over [num_reqs, vocab_size] float32; here a program reads a tile
of one row in the model's own dtype, computes the noise in registers and keeps one number:

    row      | tile 0 | tile 1 | tile 2 | ...      one program a tile:  its largest score
                        ^^^^^^                     one program a row:   the best tile, read again,
                                                                        and the token in it

That a tile keeps its largest score and not also where it was halves the work of the reduction.
Tiles are the same whatever the batch, and an argmax does not care how it is split.

Upstream: vllm/v1/worker/gpu/sample/gumbel.py (0.23.0), whose noise is Triton's Philox generator.
Left out: float64 noise, processed logits, sampling without replacement for drafts.
"""

from __future__ import annotations

import torch

from nanovllm.sampling_params import SAMPLING_EPS
from nanovllm.triton_utils import tl, triton
from nanovllm.v1.sample.ops.seeded_noise import gumbel_noise_kernel

TILE = 4096
NUM_WARPS = 8


def gumbel_sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    noise_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token per row from softmax(logits / temperature).

    Args:
        logits: [num_reqs, vocab_size] of any float dtype, columns adjacent; not changed.
        temperature: [num_reqs] float32; below 1e-5 the row is greedy. None: 1 everywhere.
        noise_keys: [num_reqs, 2] int32, from seeded_noise. None: every row is greedy.

    Returns:
        [num_reqs] int64 token ids. Of equal scores the lowest token id wins.
    """
    num_reqs, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    tile_max = torch.empty((num_reqs, num_tiles), dtype=torch.float32, device=logits.device)
    sampled = torch.empty(num_reqs, dtype=torch.int64, device=logits.device)
    rows = (logits, logits.stride(0), temperature, noise_keys, vocab_size, num_tiles)
    constants = {
        "SAMPLING_EPS": SAMPLING_EPS,
        "APPROX_LOG": logits.is_cuda,
        "TILE": TILE,
        "num_warps": NUM_WARPS,
    }
    _tile_max_kernel[(num_tiles, num_reqs)](*rows, tile_max, **constants)
    _best_token_kernel[(num_reqs,)](
        *rows, tile_max, sampled, NUM_TILES=triton.next_power_of_2(num_tiles), **constants
    )
    return sampled


@triton.jit
def _tile_max_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    noise_keys_ptr,
    vocab_size,
    num_tiles,
    tile_max_ptr,
    SAMPLING_EPS: tl.constexpr,
    APPROX_LOG: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token_ids = tile * TILE + tl.arange(0, TILE)
    logits = load_logits(logits_ptr + row * logits_stride, token_ids, vocab_size)
    scores = token_scores(
        logits, token_ids, row, temperature_ptr, noise_keys_ptr, SAMPLING_EPS, APPROX_LOG
    )
    tl.store(tile_max_ptr + row * num_tiles + tile, tl.max(scores))


@triton.jit
def _best_token_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    noise_keys_ptr,
    vocab_size,
    num_tiles,
    tile_max_ptr,
    sampled_ptr,
    SAMPLING_EPS: tl.constexpr,
    APPROX_LOG: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = best_tile(tile_max_ptr + row * num_tiles, num_tiles, NUM_TILES)
    token_ids = tile * TILE + tl.arange(0, TILE)
    logits = load_logits(logits_ptr + row * logits_stride, token_ids, vocab_size)
    scores = token_scores(
        logits, token_ids, row, temperature_ptr, noise_keys_ptr, SAMPLING_EPS, APPROX_LOG
    )
    tl.store(sampled_ptr + row, lowest_argmax(scores, token_ids, vocab_size - 1).to(tl.int64))


# ---- building blocks, for ops/topk_topp_triton.py as well ----


@triton.jit
def load_logits(row_ptr, token_ids, vocab_size):
    """float32 logits; -inf beyond the vocabulary."""
    return tl.load(row_ptr + token_ids, mask=token_ids < vocab_size, other=-float("inf")).to(
        tl.float32
    )


@triton.jit
def load_temperature(temperature_ptr, row):
    """A row's temperature; 1 where there is no column of them."""
    temperature = tl.full([], 1.0, dtype=tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    return temperature


@triton.jit
def token_scores(
    logits,
    token_ids,
    row,
    temperature_ptr,
    noise_keys_ptr,
    SAMPLING_EPS: tl.constexpr,
    APPROX_LOG: tl.constexpr,
):
    """What an argmax has to be taken of: logits / temperature + noise, for a greedy row logits."""
    scores = logits
    if noise_keys_ptr is not None:
        temperature = load_temperature(temperature_ptr, row)
        if temperature >= SAMPLING_EPS:
            key_low = tl.load(noise_keys_ptr + 2 * row)
            key_high = tl.load(noise_keys_ptr + 2 * row + 1)
            noise = gumbel_noise_kernel(key_low, key_high, token_ids, APPROX_LOG)
            scores = logits * (1.0 / temperature) + noise
    return scores


@triton.jit
def best_tile(tile_max_ptr, num_tiles, NUM_TILES: tl.constexpr):
    """The first tile of a row that has the largest score."""
    tiles = tl.arange(0, NUM_TILES)
    tile_max = tl.load(tile_max_ptr + tiles, mask=tiles < num_tiles, other=-float("inf"))
    return lowest_argmax(tile_max, tiles, num_tiles - 1)


@triton.jit
def lowest_argmax(scores, ids, highest_id):
    """The lowest of the ids that have the largest score. Never above highest_id, even for NaN."""
    return tl.min(tl.where(scores == tl.max(scores), ids, highest_id))
