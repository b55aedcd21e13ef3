"""Min-p, top-k and top-p by threshold search: no sort, two to five reads of the logits.

All three filters keep the tokens at or above some logit. For min-p it is known once the largest
logit is. For the others it is found by counting. Let

    measure(t) = the number (top-k) or the probability mass (top-p) of the tokens above logit t.

It falls as t grows, and the threshold is the smallest t with measure(t) < target, where the target
is k, or p times the whole mass: then a token at t is kept, since the tokens more likely than it do
not reach the target yet, and so are its ties. The search narrows an interval (low, high] around
that t. Kernels that read the logits have a program for a tile of a row, the others one for a row:

    1  _row_stats_kernel   what is known of each tile without a pivot: its largest logit, its mass
    2  _guess_kernel       guess the threshold, place 8 pivots about it
    3  _measure_kernel     measure the row above each pivot
    4  _narrow_kernel      two pivots enclose the threshold: guess between them, place 8 new ones
    5  _draw_kernel        above the interval: tokens are kept, so score them (ops/gumbel.py);
                           inside it: write the few tokens into a list
    6  _finish_kernel      search the list to the last bit of the threshold, score what is kept of
                           it, choose

        logit   min ............. low [ list ] high ............. max
                     dropped           ?              kept

Steps 3 and 4 take place up to three times; a row whose interval is short enough sits the others
out. The first guess makes that happen soon. For top-p it takes the mass to be spread normally over
the logits, with the mean and deviation that it has. Pivots get denser towards the guess, by fours,
so a row of another shape costs rounds and nothing else. The second time they are spread evenly.
The last time the guess interpolates: the odds of being above t, measure(t) / (whole - measure(t)),
are nearly exponential in t for most shapes.

A small k needs no rounds at all: step 1 also notes the largest logit of each group of 128 tokens.
At least k tokens are no less than the k-th largest of these, and seldom many more are.

A row with top-k and top-p needs the threshold of the first before the mass left for the second is
known, so its list is everything above low: little more than k tokens.
A list that overflows costs time, not exactness: step 6 then searches the whole row.

Nothing depends on the batch or on timing: tiles are fixed, and the list, whose order is not, is
only summed in integers and searched for a maximum.

Upstream: vllm/v1/sample/ops/topk_topp_triton.py (0.23.0), another search (pivots from the row's
mean and deviation), which cuts ties by position and leaves a masked row to a sampler.
Left out: masked logits as a result; nobody reads them.
"""

from __future__ import annotations

import torch

from nanovllm.sampling_params import SAMPLING_EPS
from nanovllm.triton_utils import HAS_TRITON, tl, triton
from nanovllm.v1.sample.ops.gumbel import (
    best_tile,
    load_logits,
    load_temperature,
    lowest_argmax,
    token_scores,
)

TILE = 8192
DRAW_PARTS = 2  # that step 5 takes a tile in: noise takes registers
TILE_GROUPS = 64  # in a tile: tokens of equal remainder, lest neighbours of equal kind share one
NUM_WARPS = 8
MAX_REGISTERS = 64  # a thread; four programs share a multiprocessor
NUM_ROUNDS = 3
NUM_PIVOTS = 8
SHORT = 2048  # tokens; an interval with no more of them needs no further round
LIST_CAPACITY = 16384  # tokens a row
LIST_BLOCK = 1024
# A row's state between kernels, float32 each: the interval (LOW, HIGH], the measures above its
# ends, the target, the whole measure, what min-p demands, the largest logit, and whether the row
# takes part in the next round.
_constant = tl.constexpr if HAS_TRITON else int
LOW, HIGH, BELOW, ABOVE, TARGET, WHOLE, FLOOR, LARGEST, SEARCHING = map(_constant, range(9))
# Int32 numbers; so far apart that the atomics of two rows do not wait for each other.
LIST_LEN_STRIDE = _constant(32)
STATE_SIZE = 9
# Bits of a float32 that a number of these types cannot have.
KEY_SHIFT = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def top_k_top_p_sample(
    logits: torch.Tensor,
    noise_keys: torch.Tensor,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    temperature: torch.Tensor | None = None,
    log_min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample from softmax(logits / temperature) after min-p, top-k and top-p.

    Args:
        logits: [num_reqs, vocab_size] float32, float16 or bfloat16, columns adjacent; not changed.
        noise_keys: [num_reqs, 2] int32, from seeded_noise.
        k: [num_reqs] int32 in 1..vocab_size (vocab_size: no limit), or None.
        p: [num_reqs] float32 in (0, 1] (1: no limit), or None.
        temperature: [num_reqs] float32; below 1e-5 the row is greedy. None: 1 everywhere.
        log_min_p: [num_reqs] float32, logarithms (-inf: no limit), or None.

    Returns:
        [num_reqs] int64 token ids.
    """
    num_reqs, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((num_reqs, *shape), dtype=dtype, device=logits.device)

    stats, group_max = scratch(5, num_tiles), scratch(num_tiles * TILE_GROUPS)
    state, pivots = scratch(STATE_SIZE), scratch(NUM_PIVOTS)
    measures = scratch(num_tiles, NUM_PIVOTS)
    tile_max = scratch(num_tiles * DRAW_PARTS)
    list_logits, list_ids = scratch(LIST_CAPACITY), scratch(LIST_CAPACITY, dtype=torch.int32)
    list_len = scratch(int(LIST_LEN_STRIDE), dtype=torch.int32)
    sampled = scratch(dtype=torch.int64)

    rows = (logits, logits.stride(0), temperature, k, p, vocab_size, num_tiles)
    shape = {
        "SAMPLING_EPS": SAMPLING_EPS,
        "TILE": TILE,
        "NUM_TILES": triton.next_power_of_2(num_tiles),
        "num_warps": NUM_WARPS,
    }
    tiled = {**shape, "maxnreg": MAX_REGISTERS}
    pivot = {"NUM_PIVOTS": NUM_PIVOTS, "STATE_SIZE": STATE_SIZE}
    search = {**pivot, "KEY_SHIFT": KEY_SHIFT[logits.dtype], "LIST_BLOCK": LIST_BLOCK}
    draw = {
        "CAPACITY": LIST_CAPACITY,
        "APPROX_LOG": logits.is_cuda,
        "PARTS": DRAW_PARTS,
        "STATE_SIZE": STATE_SIZE,
    }

    grid = (num_tiles, num_reqs)
    _row_stats_kernel[grid](*rows, stats, group_max, list_len, TILE_GROUPS=TILE_GROUPS, **tiled)
    _guess_kernel[(num_reqs,)](
        *rows, log_min_p, stats, group_max, pivots, state,
        TILE_GROUPS=TILE_GROUPS, CAPACITY=LIST_CAPACITY, **search, **shape,
    )  # fmt: skip
    for search_round in range(0 if k is None and p is None else NUM_ROUNDS):
        _measure_kernel[grid](*rows, stats, pivots, measures, state, **pivot, **tiled)
        _narrow_kernel[(num_reqs,)](
            *rows, pivots, measures, state,
            FIRST=search_round == 0, LAST=search_round == NUM_ROUNDS - 1, SHORT=SHORT,
            KEY_SHIFT=KEY_SHIFT[logits.dtype], **pivot, **shape,
        )  # fmt: skip
    outputs = (noise_keys, tile_max, list_logits, list_ids, list_len)
    _draw_kernel[(num_tiles * DRAW_PARTS, num_reqs)](*rows, stats, state, *outputs, **draw, **tiled)
    _finish_kernel[(num_reqs,)](*rows, state, *outputs, sampled, **{**search, **draw, **shape})
    return sampled


@triton.jit
def _row_stats_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    k_ptr,
    p_ptr,
    vocab_size,
    num_tiles,
    stats_ptr,  # [num_reqs, 5, num_tiles]: see below; masses in units of the largest logit's
    group_max_ptr,  # [num_reqs, num_tiles * TILE_GROUPS]
    list_len_ptr,
    TILE_GROUPS: tl.constexpr,
    SAMPLING_EPS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, temperature = _limits(row, k_ptr, p_ptr, temperature_ptr, vocab_size, SAMPLING_EPS)
    token_ids = tile * TILE + tl.arange(0, TILE)
    logits = load_logits(logits_ptr + row * logits_stride, token_ids, vocab_size)
    if k_ptr is not None:
        group_max = tl.max(tl.reshape(logits, [TILE // TILE_GROUPS, TILE_GROUPS]), axis=0)
        groups = tile * TILE_GROUPS + tl.arange(0, TILE_GROUPS)
        tl.store(group_max_ptr + row * num_tiles * TILE_GROUPS + groups, group_max)
        largest = tl.max(group_max)
    else:
        largest = tl.max(logits)
    possible = logits > -float("inf")
    smallest = tl.min(tl.where(possible, logits, float("inf")))
    weights = tl.where(possible, _weights(logits, largest, temperature), 0.0)
    stats_ptr += row * 5 * num_tiles + tile
    tl.store(stats_ptr, largest)
    tl.store(stats_ptr + num_tiles, smallest)  # of the finite ones
    tl.store(stats_ptr + 2 * num_tiles, tl.sum(weights))
    if p_ptr is not None:
        # Where the mass is, and how widely spread.
        distance = tl.where(weights > 0, logits - largest, 0.0)
        tl.store(stats_ptr + 3 * num_tiles, tl.sum(weights * distance))
        tl.store(stats_ptr + 4 * num_tiles, tl.sum(weights * distance * distance))
    if tile == 0:
        tl.store(list_len_ptr + row * LIST_LEN_STRIDE, 0)


@triton.jit
def _guess_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    k_ptr,
    p_ptr,
    vocab_size,
    num_tiles,
    log_min_p_ptr,
    stats_ptr,
    group_max_ptr,
    pivots_ptr,  # [num_reqs, NUM_PIVOTS]
    state_ptr,  # [num_reqs, STATE_SIZE]
    TILE_GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    SAMPLING_EPS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k, p, temperature = _limits(row, k_ptr, p_ptr, temperature_ptr, vocab_size, SAMPLING_EPS)
    stats_ptr += row * 5 * num_tiles
    state_ptr += row * STATE_SIZE
    largest, smallest, mass = _row_stats(stats_ptr, num_tiles, temperature, NUM_TILES)
    floor = tl.full([], -float("inf"), dtype=tl.float32)
    if log_min_p_ptr is not None:
        floor = largest + temperature * tl.load(log_min_p_ptr + row)

    # Without a limit everything is above the interval.
    low = tl.full([], -float("inf"), dtype=tl.float32)
    high = low
    searching = 0.0
    if (k < vocab_size) | (p < 1):
        searching = 1.0
        high = largest
        # Below all tokens that min-p allows, but not infinite.
        bottom_key = _ordered_key(tl.maximum(smallest, floor), KEY_SHIFT) - 1
        bottom_key = tl.maximum(bottom_key, _ordered_key(low, KEY_SHIFT) + 1)
        high_key = _ordered_key(largest, KEY_SHIFT)
        if k < vocab_size:
            num_groups = num_tiles * TILE_GROUPS
            # Then the groups have room in the list, all tokens of them.
            few = k * (TILE // TILE_GROUPS) <= CAPACITY
            # Of tokens in random order this many groups hold one of the k most likely.
            groups = num_groups * (1.0 - tl.exp2(-1.4426950408889634 * k / num_groups))
            group_max_ptr += row * num_groups
            groups_max = (
                group_max_ptr, group_max_ptr, num_groups, 0, low, high, low, largest, temperature
            )  # fmt: skip
            key = _search(
                groups_max, _ordered_key(low, KEY_SHIFT), high_key, tl.zeros([], dtype=tl.int64),
                tl.where(few, k.to(tl.float64), groups.to(tl.float64)),
                True, NUM_PIVOTS, KEY_SHIFT, LIST_BLOCK,
            )  # fmt: skip
            low_key = bottom_key
            guess = _from_key(key, KEY_SHIFT)
            radius = largest - guess
            if few:
                searching = 0.0
                low = _from_key(key - 1, KEY_SHIFT)
                high = tl.where(p < 1, float("inf"), largest)
        else:
            # Tokens further down than `reach` have a mass of less than vocab_size * exp(-reach),
            # which is the 1 - p that top-p may drop.
            dropped = (1.0 - p) * tl.where(floor > -float("inf"), 1.0, mass)
            reach = temperature * (tl.log(vocab_size / dropped) + 0.01)
            low_key = tl.maximum(bottom_key, _ordered_key(largest - reach, KEY_SHIFT) - 1)
            low = _from_key(low_key, KEY_SHIFT)
            mean, deviation = _moments(stats_ptr, num_tiles, temperature, largest, mass, NUM_TILES)
            # Tukey's approximation of the normal quantile.
            quantile = 4.91 * (tl.exp2(0.14 * tl.log2(p)) - tl.exp2(0.14 * tl.log2(1.0 - p)))
            guess = mean - deviation * quantile
            radius = 2.0 * deviation
        index = tl.arange(0, NUM_PIVOTS)
        pivots = _pivots(guess, radius, radius, low_key, high_key, index, NUM_PIVOTS, KEY_SHIFT)
        # The last pivot measures the whole row.
        pivots = tl.where(index == NUM_PIVOTS - 1, _from_key(bottom_key, KEY_SHIFT), pivots)
        tl.store(pivots_ptr + row * NUM_PIVOTS + index, pivots)
    tl.store(state_ptr + LOW, low)
    tl.store(state_ptr + HIGH, high)
    tl.store(state_ptr + BELOW, float("inf"))
    tl.store(state_ptr + ABOVE, 0.0)
    tl.store(state_ptr + FLOOR, floor)
    tl.store(state_ptr + LARGEST, largest)
    tl.store(state_ptr + SEARCHING, searching)


@triton.jit
def _measure_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    k_ptr,
    p_ptr,
    vocab_size,
    num_tiles,
    stats_ptr,
    pivots_ptr,
    measures_ptr,  # [num_reqs, num_tiles, NUM_PIVOTS]
    state_ptr,
    NUM_PIVOTS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    SAMPLING_EPS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state_ptr += row * STATE_SIZE
    if tl.load(state_ptr + SEARCHING) == 0:
        return
    k, _, temperature = _limits(row, k_ptr, p_ptr, temperature_ptr, vocab_size, SAMPLING_EPS)
    floor, largest = tl.load(state_ptr + FLOOR), tl.load(state_ptr + LARGEST)
    tile_largest = tl.load(stats_ptr + row * 5 * num_tiles + tile)
    index = tl.arange(0, NUM_PIVOTS)
    pivots_ptr += row * NUM_PIVOTS
    measures = tl.zeros([NUM_PIVOTS], dtype=tl.float32)
    # The last pivot is the lowest.
    if (tile_largest > tl.load(pivots_ptr + NUM_PIVOTS - 1)) & (tile_largest >= floor):
        token_ids = tile * TILE + tl.arange(0, TILE)
        logits = load_logits(logits_ptr + row * logits_stride, token_ids, vocab_size)
        weights = _weights(logits, largest, temperature)
        if k_ptr is not None:
            weights = tl.where(k < vocab_size, 1.0, weights)
        weights = tl.where(logits >= floor, weights, 0.0)
        pivots = tl.load(pivots_ptr + index)
        is_above = (logits[None, :] > pivots[:, None]).to(tl.float32)
        measures = tl.sum(is_above * weights[None, :], axis=1)
    tl.store(measures_ptr + (row * num_tiles + tile) * NUM_PIVOTS + index, measures)


@triton.jit
def _narrow_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    k_ptr,
    p_ptr,
    vocab_size,
    num_tiles,
    pivots_ptr,
    measures_ptr,
    state_ptr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SHORT: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    SAMPLING_EPS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    state_ptr += row * STATE_SIZE
    if tl.load(state_ptr + SEARCHING) == 0:
        return
    k, p, temperature = _limits(row, k_ptr, p_ptr, temperature_ptr, vocab_size, SAMPLING_EPS)
    index = tl.arange(0, NUM_PIVOTS)
    tiles = tl.arange(0, NUM_TILES)[:, None]
    pivots_ptr += row * NUM_PIVOTS + index
    measures_ptr += row * num_tiles * NUM_PIVOTS
    pivots = tl.load(pivots_ptr)
    parts = tl.load(
        measures_ptr + tiles * NUM_PIVOTS + index[None, :], mask=tiles < num_tiles, other=0.0
    )
    measures = tl.sum(parts, axis=0)
    if FIRST:
        whole = tl.sum(tl.where(index == NUM_PIVOTS - 1, measures, 0.0))
        target = tl.where(k < vocab_size, k.to(tl.float32), p * whole)
        tl.store(state_ptr + WHOLE, whole)
        tl.store(state_ptr + TARGET, target)
    else:
        whole, target = tl.load(state_ptr + WHOLE), tl.load(state_ptr + TARGET)
    # Measures grow as pivots fall.
    reached = measures >= target
    low, below = tl.load(state_ptr + LOW), tl.load(state_ptr + BELOW)
    high, above = tl.load(state_ptr + HIGH), tl.load(state_ptr + ABOVE)
    low = tl.maximum(low, tl.max(tl.where(reached, pivots, -float("inf"))))
    below = tl.minimum(below, tl.min(tl.where(reached, measures, float("inf"))))
    high = tl.minimum(high, tl.min(tl.where(reached, float("inf"), pivots)))
    above = tl.maximum(above, tl.max(tl.where(reached, 0.0, measures)))

    # All of a row may measure less than k: then nothing is cut.
    nothing = low == -float("inf")
    low_key, high_key = _ordered_key(low, KEY_SHIFT), _ordered_key(high, KEY_SHIFT)
    # An interval that only one number fits in: it is the threshold.
    found = nothing | (high_key.to(tl.int64) - low_key <= 1)
    # Every token in the interval has at least the mass of one at its lower end.
    lightest = _weights(low, tl.load(state_ptr + LARGEST), temperature)
    length = (below - above) / tl.where(k < vocab_size, 1.0, lightest)
    if LAST | found | (length <= SHORT):
        tl.store(state_ptr + SEARCHING, 0.0)
        high = tl.where(found, low, high)
        if (k < vocab_size) & (p < 1):
            high, above = float("inf"), 0.0
    else:
        if FIRST:
            keys = _ordered_key(high - (high - low) * ((index + 1) / (NUM_PIVOTS + 1)), KEY_SHIFT)
            keys = tl.minimum(tl.maximum(keys, low_key + 1), high_key - 1)
            pivots = _from_key(keys, KEY_SHIFT)
        else:
            least = tl.where(k < vocab_size, 0.5, whole * 1e-6)
            odds_above = _log_odds(above, whole, least)
            share = (_log_odds(target, whole, least) - odds_above) / (
                _log_odds(below, whole, least) - odds_above
            )
            guess = high - (high - low) * tl.minimum(tl.maximum(share, 0.0), 1.0)
            pivots = _pivots(
                guess, high - guess, guess - low, low_key, high_key, index, NUM_PIVOTS, KEY_SHIFT
            )
        tl.store(pivots_ptr, pivots)
    tl.store(state_ptr + LOW, low)
    tl.store(state_ptr + BELOW, below)
    tl.store(state_ptr + HIGH, high)
    tl.store(state_ptr + ABOVE, above)


@triton.jit
def _draw_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    k_ptr,
    p_ptr,
    vocab_size,
    num_tiles,
    stats_ptr,
    state_ptr,
    noise_keys_ptr,
    tile_max_ptr,  # [num_reqs, num_tiles * PARTS]: the largest score among tokens surely kept
    list_logits_ptr,  # [num_reqs, CAPACITY]: the tokens in the interval, in any order
    list_ids_ptr,  # [num_reqs, CAPACITY]
    list_len_ptr,  # [num_reqs, LIST_LEN_STRIDE]: how many there are, beyond CAPACITY too
    STATE_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    APPROX_LOG: tl.constexpr,
    SAMPLING_EPS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state_ptr += row * STATE_SIZE
    low, high = tl.load(state_ptr + LOW), tl.load(state_ptr + HIGH)
    floor = tl.load(state_ptr + FLOOR)
    tile_largest = tl.load(stats_ptr + row * 5 * num_tiles + tile // PARTS)
    token_ids = tile * (TILE // PARTS) + tl.arange(0, TILE // PARTS)
    tile_max = -float("inf")
    if (tile_largest > low) & (tile_largest >= floor):
        logits = load_logits(logits_ptr + row * logits_stride, token_ids, vocab_size)
        logits = tl.where(logits >= floor, logits, -float("inf"))
        if tile_largest > high:
            scores = token_scores(
                logits, token_ids, row, temperature_ptr, noise_keys_ptr, SAMPLING_EPS, APPROX_LOG
            )
            tile_max = tl.max(tl.where(logits > high, scores, -float("inf")))
        listed = (logits > low) & (logits <= high)
        count = tl.sum(listed.to(tl.int32))
        list_len_ptr += row * LIST_LEN_STRIDE
        if count > CAPACITY // 4:
            # Tokens that all take a slot would only wait for each other to overflow the list.
            tl.atomic_add(list_len_ptr, CAPACITY + 1, sem="relaxed")
        elif count > 0:
            counters = list_len_ptr + tl.zeros([TILE // PARTS], dtype=tl.int32)
            slots = tl.atomic_add(counters, 1, mask=listed, sem="relaxed")
            mask = listed & (slots < CAPACITY)
            tl.store(list_logits_ptr + row * CAPACITY + slots, logits, mask=mask)
            tl.store(list_ids_ptr + row * CAPACITY + slots, token_ids, mask=mask)
    tl.store(tile_max_ptr + row * num_tiles * PARTS + tile, tile_max)


@triton.jit
def _finish_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    k_ptr,
    p_ptr,
    vocab_size,
    num_tiles,
    state_ptr,
    noise_keys_ptr,
    tile_max_ptr,
    list_logits_ptr,
    list_ids_ptr,
    list_len_ptr,
    sampled_ptr,
    NUM_PIVOTS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    CAPACITY: tl.constexpr,
    PARTS: tl.constexpr,
    APPROX_LOG: tl.constexpr,
    SAMPLING_EPS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k, p, temperature = _limits(row, k_ptr, p_ptr, temperature_ptr, vocab_size, SAMPLING_EPS)
    row_ptr = logits_ptr + row * logits_stride
    list_logits_ptr += row * CAPACITY
    list_ids_ptr += row * CAPACITY
    state_ptr += row * STATE_SIZE
    low, high = tl.load(state_ptr + LOW), tl.load(state_ptr + HIGH)
    floor, largest = tl.load(state_ptr + FLOOR), tl.load(state_ptr + LARGEST)

    best = tl.zeros([], dtype=tl.int32)
    best_score = tl.full([], -float("inf"), dtype=tl.float32)
    if largest > high:
        # The best of the tokens above the interval: the best tile once more, as in ops/gumbel.py.
        num_parts = num_tiles * PARTS
        tile = best_tile(tile_max_ptr + row * num_parts, num_parts, NUM_TILES * PARTS)
        token_ids = tile * (TILE // PARTS) + tl.arange(0, TILE // PARTS)
        logits = load_logits(row_ptr, token_ids, vocab_size)
        logits = tl.where((logits >= floor) & (logits > high), logits, -float("inf"))
        scores = token_scores(
            logits, token_ids, row, temperature_ptr, noise_keys_ptr, SAMPLING_EPS, APPROX_LOG
        )
        best_score = tl.max(scores)
        best = lowest_argmax(scores, token_ids, vocab_size - 1)

    length = tl.load(list_len_ptr + row * LIST_LEN_STRIDE)
    if length > 0:
        # Of a list that overflowed nothing is used.
        num_listed = tl.where(length > CAPACITY, 0, length)
        length = tl.where(length > CAPACITY, vocab_size, length)
        # The threshold's key is in (key, high_key].
        key = _ordered_key(low, KEY_SHIFT)
        high_key = _ordered_key(tl.minimum(high, largest), KEY_SHIFT)
        above = tl.load(state_ptr + ABOVE)
        listed = (
            row_ptr, list_logits_ptr, length, num_listed, low, high, floor, largest, temperature
        )  # fmt: skip
        if k < vocab_size:
            key = _search(
                listed, key, high_key, above.to(tl.int64), k.to(tl.float64), True,
                NUM_PIVOTS, KEY_SHIFT, LIST_BLOCK,
            )  # fmt: skip
        if p < 1:
            base = _fixed_point(above)
            goal = _fixed_point(tl.load(state_ptr + TARGET)).to(tl.float64)
            if k < vocab_size:
                # Of what top-k has left. The key itself is kept, so the search begins below it.
                key -= 1
                left = _measures_of_list(
                    listed, tl.zeros([1], dtype=tl.int32) + key, base, False,
                    1, KEY_SHIFT, LIST_BLOCK,
                )  # fmt: skip
                goal = p.to(tl.float64) * tl.max(left).to(tl.float64)
            key = _search(
                listed, key, high_key, base, goal, False,
                NUM_PIVOTS, KEY_SHIFT, LIST_BLOCK,
            )  # fmt: skip
        for start in range(0, length, LIST_BLOCK):
            list_logits, kept = _load_list(listed, start, LIST_BLOCK)
            slots = start + tl.arange(0, LIST_BLOCK)
            list_ids = tl.load(list_ids_ptr + slots, mask=slots < num_listed, other=0)
            list_ids = tl.where(slots < num_listed, list_ids, slots)
            list_scores = token_scores(
                list_logits, list_ids, row, temperature_ptr, noise_keys_ptr, SAMPLING_EPS,
                APPROX_LOG,
            )  # fmt: skip
            kept &= _ordered_key(list_logits, KEY_SHIFT) >= key
            list_scores = tl.where(kept, list_scores, -float("inf"))
            score = tl.max(list_scores)
            token = lowest_argmax(list_scores, list_ids, vocab_size - 1)
            better = (score > best_score) | ((score == best_score) & (token < best))
            best = tl.where(better, token, best)
            best_score = tl.where(better, score, best_score)
    tl.store(sampled_ptr + row, best.to(tl.int64))


# ---- building blocks ----


@triton.jit
def _limits(row, k_ptr, p_ptr, temperature_ptr, vocab_size, SAMPLING_EPS: tl.constexpr):
    """(k, p, temperature) of a row; neutral where there is no column, and for a greedy row."""
    k, p = vocab_size, 1.0
    if k_ptr is not None:
        k = tl.load(k_ptr + row)
    if p_ptr is not None:
        p = tl.load(p_ptr + row)
    temperature = load_temperature(temperature_ptr, row)
    greedy = temperature < SAMPLING_EPS
    k, p = tl.where(greedy, vocab_size, k), tl.where(greedy, 1.0, p)
    return k, p, tl.where(greedy, 1.0, temperature)


@triton.jit
def _pivots(
    guess,
    up,  # the furthest pivots are half as far away
    down,
    low_key,
    high_key,
    index,  # 0, 1, ... NUM_PIVOTS - 1
    NUM_PIVOTS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
):
    """Logits about the guess, inside (low, high), four times further away from pair to pair."""
    pair = index // 2
    is_up = index % 2 == 0
    offset = tl.where(is_up, up, -down) * tl.exp2((2 * pair + 1 - NUM_PIVOTS).to(tl.float32))
    key, guess_key = _ordered_key(guess + offset, KEY_SHIFT), _ordered_key(guess, KEY_SHIFT)
    # Different ones, where numbers are that far apart.
    key = tl.where(is_up, tl.maximum(key, guess_key + pair), tl.minimum(key, guess_key - 1 - pair))
    key = tl.minimum(tl.maximum(key, low_key + 1), high_key - 1)
    return _from_key(key, KEY_SHIFT)


@triton.jit
def _weights(logits, largest, temperature):
    """Probabilities in units of the most likely token's."""
    return tl.exp2((logits - largest) * (1.4426950408889634 / temperature))


@triton.jit
def _fixed_point(mass):
    """A mass as int64, in units of 2^-34 of the most likely token's. Sums of integers do not depend
    on the order; those of 2^18 tokens take 52 bits, which a float64 holds as well."""
    return (mass * 17179869184.0).to(tl.int64)


@triton.jit
def _row_stats(stats_ptr, num_tiles, temperature, NUM_TILES: tl.constexpr):
    """(largest logit, smallest finite one, mass in units of the largest) from the tiles' own."""
    tiles = tl.arange(0, NUM_TILES)
    mask = tiles < num_tiles
    tile_largest = tl.load(stats_ptr + tiles, mask=mask, other=-float("inf"))
    smallest = tl.load(stats_ptr + num_tiles + tiles, mask=mask, other=float("inf"))
    mass = tl.load(stats_ptr + 2 * num_tiles + tiles, mask=mask, other=0.0)
    largest = tl.max(tile_largest)
    mass = tl.where(mass > 0, mass * _weights(tile_largest, largest, temperature), 0.0)
    return largest, tl.min(smallest), tl.sum(mass)


@triton.jit
def _moments(stats_ptr, num_tiles, temperature, largest, mass, NUM_TILES: tl.constexpr):
    """(mean, standard deviation) of the logit of a token drawn without filters."""
    tiles = tl.arange(0, NUM_TILES)
    mask = tiles < num_tiles
    shift = tl.load(stats_ptr + tiles, mask=mask, other=-float("inf")) - largest
    weight = _weights(shift, 0.0, temperature)
    shift = tl.where(weight > 0, shift, 0.0)
    parts = tl.load(stats_ptr + 2 * num_tiles + tiles, mask=mask, other=0.0)
    first = tl.load(stats_ptr + 3 * num_tiles + tiles, mask=mask, other=0.0)
    second = tl.load(stats_ptr + 4 * num_tiles + tiles, mask=mask, other=0.0)
    # From a tile's largest logit to that of the row.
    second += (2.0 * first + parts * shift) * shift
    first += parts * shift
    mean = tl.sum(weight * first) / mass
    variance = tl.sum(weight * second) / mass - mean * mean
    return largest + mean, tl.sqrt(tl.maximum(variance, 0.0))


@triton.jit
def _log_odds(measure, whole, least):
    return tl.log(tl.maximum(measure, least) / tl.maximum(whole - measure, least))


@triton.jit
def _ordered_key(x, KEY_SHIFT: tl.constexpr):
    """An int32 in the order of the floats, and next to those of the next floats; without the bits
    that they cannot have. -0 and 0 have the same."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -0x80000000 - bits, bits) >> KEY_SHIFT


@triton.jit
def _from_key(key, KEY_SHIFT: tl.constexpr):
    """The float with this key."""
    bits = key << KEY_SHIFT
    return tl.where(bits < 0, -0x80000000 - bits, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load_list(tokens, start, LIST_BLOCK: tl.constexpr):
    """A block of the list, or of the row where the list was too short: logits, which count.
    `tokens` is what _measures_of_list takes."""
    row_ptr, list_ptr, length, num_listed, low, high, floor, _, _ = tokens
    slots = start + tl.arange(0, LIST_BLOCK)
    listed = slots < num_listed
    logits = tl.load(row_ptr + slots, mask=(slots < length) & ~listed, other=-float("inf"))
    list_logits = tl.load(list_ptr + slots, mask=listed, other=-float("inf"))
    logits = tl.where(listed, list_logits, logits.to(tl.float32))
    return logits, (logits > low) & (logits <= high) & (logits >= floor)


@triton.jit
def _measures_of_list(
    tokens,  # (row, list, how many in the row or list, in the list, low, high, floor, largest, T)
    pivots,  # [NUM_PIVOTS] int32 keys
    base,
    BY_COUNT: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    """[NUM_PIVOTS] int64: base and the measure of the list above each pivot."""
    measures = tl.zeros([NUM_PIVOTS], dtype=tl.int64) + base
    _, _, length, _, _, _, _, largest, temperature = tokens
    for start in range(0, length, LIST_BLOCK):
        logits, listed = _load_list(tokens, start, LIST_BLOCK)
        weights = listed.to(tl.int64)
        if not BY_COUNT:
            mass = tl.where(listed, _weights(logits, largest, temperature), 0.0)
            weights = _fixed_point(mass)
        is_above = _ordered_key(logits, KEY_SHIFT)[None, :] > pivots[:, None]
        measures += tl.sum(tl.where(is_above, weights[None, :], 0), axis=1)
    return measures


@triton.jit
def _search(
    tokens,
    low_key,
    high_key,
    base,
    target,
    BY_COUNT: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    """The smallest key in (low_key, high_key] whose measure is less than the target."""
    index = tl.arange(0, NUM_PIVOTS) + 1
    low_key, high_key = low_key.to(tl.int64), high_key.to(tl.int64)
    while high_key - low_key > 1:
        pivots = low_key + (high_key - low_key) * index // (NUM_PIVOTS + 1)
        pivots = tl.maximum(pivots, low_key + 1)
        measures = _measures_of_list(
            tokens, pivots.to(tl.int32), base, BY_COUNT, NUM_PIVOTS, KEY_SHIFT, LIST_BLOCK,
        )  # fmt: skip
        # Never both unchanged, whatever the measures are: pivots are inside the interval.
        reached = measures.to(tl.float64) >= target
        high_key = tl.minimum(high_key, tl.min(tl.where(reached, high_key, pivots)))
        low_key = tl.maximum(low_key, tl.max(tl.where(reached, pivots, low_key)))
    return high_key.to(tl.int32)
