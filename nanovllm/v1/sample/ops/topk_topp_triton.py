"""Min-p, top-k and top-p by threshold search: no sort, four reads of the logits.

All three filters keep the tokens at or above some logit. For min-p it is known once the largest
logit is. For the others it is found by counting. Let

    measure(t) = the number (top-k) or the probability mass (top-p) of the tokens above logit t.

It falls as t grows, and the threshold is the smallest t with measure(t) < target, where the target
is k, or p times the whole mass: then a token at t is kept, since the tokens more likely than it do
not reach the target yet, and so are its ties. The search narrows an interval (low, high] around
that t, all rows at once, one tile of one row a program:

    1  _row_stats_kernel   each tile's largest and smallest logit and mass
    2  _measure_kernel     measure at 8 pivots below the maximum; two of them enclose the threshold
    3  _measure_kernel     measure at 8 pivots between those two
    4  _draw_kernel        above the interval: tokens are kept, so score them (ops/gumbel.py);
                           inside it: write the few token ids into a list
    5  _finish_kernel      one program a row: search the list to the last bit of the threshold,
                           score what is kept of it, choose

        logit   min ............. low [ list ] high ............. max
                     dropped           ?              kept

A row with top-k and top-p needs the threshold of the first before the mass left for the second is
known, so its list is everything above low: little more than k tokens.
A list that overflows (ties, or logits spread so oddly that the pivots all missed) costs time, not
exactness: step 5 then searches the whole row.

Nothing depends on the batch or on timing: tiles are fixed, and the list, whose order is not, is
only summed in integers and searched for a maximum.

Upstream: vllm/v1/sample/ops/topk_topp_triton.py (0.23.0), another search (pivots from the row's
mean and deviation), which cuts ties by position and leaves a masked row to a sampler.
Left out: masked logits as a result; nobody reads them.
"""

from __future__ import annotations

import torch

from nanovllm.sampling_params import SAMPLING_EPS
from nanovllm.triton_utils import tl, triton
from nanovllm.v1.sample.ops.gumbel import (
    best_tile,
    load_logits,
    load_temperature,
    lowest_argmax,
    token_scores,
)

TILE = 8192
NUM_WARPS = 8
MAX_REGISTERS = 128  # a thread; two programs share a multiprocessor
LIST_CAPACITY = 16384  # token ids a row; an interval of ordinary logits holds a few thousand
LIST_BLOCK = 1024
NUM_PIVOTS = 8
# Of a row's state between kernels, float32 each: the interval, the measure above it, the target,
# what min-p demands, the largest logit.
STATE_SIZE = 6


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
        logits: [num_reqs, vocab_size] of any float dtype, columns adjacent; not changed.
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

    stats = scratch(3, num_tiles)
    pivots, measures = scratch(2, NUM_PIVOTS), scratch(2, num_tiles, NUM_PIVOTS)
    state = scratch(2, STATE_SIZE)
    tile_max = scratch(num_tiles)
    token_list = scratch(LIST_CAPACITY, dtype=torch.int32)
    list_len = scratch(dtype=torch.int32)
    sampled = scratch(dtype=torch.int64)

    rows = (logits, logits.stride(0), temperature, k, p, vocab_size, num_tiles)
    search = (log_min_p, stats, pivots, measures, state)
    constants = {
        "SAMPLING_EPS": SAMPLING_EPS,
        "TILE": TILE,
        "NUM_TILES": triton.next_power_of_2(num_tiles),
        "num_warps": NUM_WARPS,
        "maxnreg": MAX_REGISTERS,
    }
    pivot = {"NUM_PIVOTS": NUM_PIVOTS, "STATE_SIZE": STATE_SIZE}
    draw = {"CAPACITY": LIST_CAPACITY, "APPROX_LOG": logits.is_cuda}
    grid = (num_tiles, num_reqs)
    _row_stats_kernel[grid](*rows, stats, list_len, **constants)
    for search_round in range(2):
        _measure_kernel[grid](*rows, *search, ROUND=search_round, **pivot, **constants)
    outputs = (noise_keys, tile_max, token_list, list_len)
    _draw_kernel[grid](*rows, *search, *outputs, **pivot, **draw, **constants)
    _finish_kernel[(num_reqs,)](
        *rows, state, *outputs, sampled, LIST_BLOCK=LIST_BLOCK, **pivot, **draw, **constants
    )
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
    stats_ptr,  # [num_reqs, 3, num_tiles]: largest, smallest finite, mass in units of the largest
    list_len_ptr,
    SAMPLING_EPS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, _, temperature = _limits(row, k_ptr, p_ptr, temperature_ptr, vocab_size, SAMPLING_EPS)
    token_ids = tile * TILE + tl.arange(0, TILE)
    logits = load_logits(logits_ptr + row * logits_stride, token_ids, vocab_size)
    largest = tl.max(logits)
    possible = logits > -float("inf")
    smallest = tl.min(tl.where(possible, logits, float("inf")))
    mass = tl.sum(tl.where(possible, _weights(logits, largest, temperature), 0.0))
    stats_ptr += row * 3 * num_tiles + tile
    tl.store(stats_ptr, largest)
    tl.store(stats_ptr + num_tiles, smallest)
    tl.store(stats_ptr + 2 * num_tiles, mass)
    if tile == 0:
        tl.store(list_len_ptr + row, 0)


@triton.jit
def _measure_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    k_ptr,
    p_ptr,
    vocab_size,
    num_tiles,
    log_min_p_ptr,
    stats_ptr,
    pivots_ptr,  # [num_reqs, 2, NUM_PIVOTS]
    measures_ptr,  # [num_reqs, 2, num_tiles, NUM_PIVOTS]
    state_ptr,  # [num_reqs, 2, STATE_SIZE]
    ROUND: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    SAMPLING_EPS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """Round 0 chooses its pivots from the row's stats, round 1 between two pivots of round 0."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p, temperature = _limits(row, k_ptr, p_ptr, temperature_ptr, vocab_size, SAMPLING_EPS)
    if (k >= vocab_size) & (p >= 1):
        return
    stats_ptr += row * 3 * num_tiles
    pivots_ptr += row * 2 * NUM_PIVOTS
    measures_ptr += row * 2 * num_tiles * NUM_PIVOTS
    state_ptr += row * 2 * STATE_SIZE
    tile_largest = tl.load(stats_ptr + tile)

    if ROUND == 0:
        largest, smallest, mass = _row_stats(stats_ptr, num_tiles, temperature, NUM_TILES)
        floor = _min_p_floor(log_min_p_ptr, row, largest, temperature)
        # How far below the maximum the threshold can be. Tokens further down than `reach` have a
        # mass of less than vocab_size * exp(-reach), which is the 1 - p that top-p may drop.
        reach = largest - tl.maximum(smallest, floor)
        if k >= vocab_size:
            dropped = (1.0 - p) * tl.where(floor > -float("inf"), 1.0, mass)
            reach = tl.minimum(reach, temperature * (tl.log(vocab_size / dropped) + 0.01))
        high, lowest = largest, largest - reach
    else:
        largest = tl.load(state_ptr + 5)
        low, high, above, target = _narrow(
            -float("inf"), largest, 0.0, 0.0, k, p, vocab_size,
            pivots_ptr, measures_ptr, num_tiles, True, NUM_PIVOTS, NUM_TILES,
        )  # fmt: skip
        floor = tl.load(state_ptr + 4)
        # Without a pivot below, any width will do: the list then takes all that is left.
        reach = tl.where(low > -float("inf"), high - low, 1.0)
        lowest = low
        state_ptr += STATE_SIZE
        pivots_ptr += NUM_PIVOTS
        measures_ptr += num_tiles * NUM_PIVOTS
    if tile == 0:
        for j in tl.static_range(NUM_PIVOTS):
            tl.store(pivots_ptr + j, _pivot(high, reach, j, NUM_PIVOTS, ROUND))
        if ROUND == 1:
            tl.store(state_ptr, low)
            tl.store(state_ptr + 1, high)
            tl.store(state_ptr + 2, above)
            tl.store(state_ptr + 3, target)
        tl.store(state_ptr + 4, floor)
        tl.store(state_ptr + 5, largest)

    measures_ptr += tile * NUM_PIVOTS
    # With min-p the mass of a tile is not that of its allowed tokens, so round 0 has to look.
    look = tile_largest > lowest
    if ROUND == 0:
        look = look | (floor > -float("inf"))
    if look & (tile_largest >= floor):
        token_ids = tile * TILE + tl.arange(0, TILE)
        logits = load_logits(logits_ptr + row * logits_stride, token_ids, vocab_size)
        weights = _weights(logits, largest, temperature)
        if k_ptr is not None:
            weights = tl.where(k < vocab_size, 1.0, weights)
        if log_min_p_ptr is not None:
            weights = tl.where(logits >= floor, weights, 0.0)
        for j in tl.static_range(NUM_PIVOTS):
            is_above = (logits > _pivot(high, reach, j, NUM_PIVOTS, ROUND)).to(tl.float32)
            tl.store(measures_ptr + j, tl.sum(weights * is_above))
    else:
        # Nothing above the proper pivots. The mass of the whole tile is known already; of its
        # number of tokens no more is needed than that it is no less than it is.
        whole = tl.load(stats_ptr + 2 * num_tiles + tile)
        whole *= _weights(tile_largest, largest, temperature)
        whole = tl.where(k < vocab_size, TILE * 1.0, whole)
        whole = tl.where((ROUND == 0) & (tile_largest >= floor), whole, 0.0)
        index = tl.arange(0, NUM_PIVOTS)
        tl.store(measures_ptr + index, tl.where(index == NUM_PIVOTS - 1, whole, 0.0))


@triton.jit
def _draw_kernel(
    logits_ptr,
    logits_stride,
    temperature_ptr,
    k_ptr,
    p_ptr,
    vocab_size,
    num_tiles,
    log_min_p_ptr,
    stats_ptr,
    pivots_ptr,
    measures_ptr,
    state_ptr,
    noise_keys_ptr,
    tile_max_ptr,  # [num_reqs, num_tiles]: the largest score among tokens surely kept
    list_ptr,  # [num_reqs, CAPACITY]: ids of the tokens in the interval, in any order
    list_len_ptr,  # [num_reqs]: how many there are, beyond CAPACITY too
    NUM_PIVOTS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    APPROX_LOG: tl.constexpr,
    SAMPLING_EPS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p, temperature = _limits(row, k_ptr, p_ptr, temperature_ptr, vocab_size, SAMPLING_EPS)
    stats_ptr += row * 3 * num_tiles
    state_ptr += (row * 2 + 1) * STATE_SIZE
    tile_largest = tl.load(stats_ptr + tile)
    low, high, above, target = -float("inf"), -float("inf"), 0.0, 0.0
    if (k < vocab_size) | (p < 1):
        floor, largest = tl.load(state_ptr + 4), tl.load(state_ptr + 5)
        low, high, above, target = _narrow(
            tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2),
            tl.load(state_ptr + 3), k, p, vocab_size,
            pivots_ptr + (row * 2 + 1) * NUM_PIVOTS,
            measures_ptr + (row * 2 + 1) * num_tiles * NUM_PIVOTS,
            num_tiles, False, NUM_PIVOTS, NUM_TILES,
        )  # fmt: skip
        if (k < vocab_size) & (p < 1):
            high, above = float("inf"), 0.0
    else:
        largest, _, _ = _row_stats(stats_ptr, num_tiles, temperature, NUM_TILES)
        floor = _min_p_floor(log_min_p_ptr, row, largest, temperature)
    if tile == 0:
        # The interval of round 1 is in the other half of `state`, which other programs still read.
        state_ptr -= STATE_SIZE
        tl.store(state_ptr, low)
        tl.store(state_ptr + 1, high)
        tl.store(state_ptr + 2, above)
        tl.store(state_ptr + 3, target)
        tl.store(state_ptr + 4, floor)
        tl.store(state_ptr + 5, largest)

    token_ids = tile * TILE + tl.arange(0, TILE)
    tile_max = -float("inf")
    if (tile_largest > low) & (tile_largest >= floor):
        logits = load_logits(logits_ptr + row * logits_stride, token_ids, vocab_size)
        if log_min_p_ptr is not None:
            logits = tl.where(logits >= floor, logits, -float("inf"))
        if tile_largest > high:
            scores = token_scores(
                logits, token_ids, row, temperature_ptr, noise_keys_ptr, SAMPLING_EPS, APPROX_LOG
            )
            tile_max = tl.max(tl.where(logits > high, scores, -float("inf")))
        listed = (logits > low) & (logits <= high)
        count = tl.sum(listed.to(tl.int32))
        if count > CAPACITY // 4:
            # Tokens that all take a slot would only wait for each other to overflow the list.
            tl.atomic_add(list_len_ptr + row, CAPACITY + 1, sem="relaxed")
        elif count > 0:
            counters = list_len_ptr + row + tl.zeros([TILE], dtype=tl.int32)
            slots = tl.atomic_add(counters, 1, mask=listed, sem="relaxed")
            keep = listed & (slots < CAPACITY)
            tl.store(list_ptr + row * CAPACITY + slots, token_ids, mask=keep)
    tl.store(tile_max_ptr + row * num_tiles + tile, tile_max)


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
    list_ptr,
    list_len_ptr,
    sampled_ptr,
    LIST_BLOCK: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    APPROX_LOG: tl.constexpr,
    SAMPLING_EPS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k, p, temperature = _limits(row, k_ptr, p_ptr, temperature_ptr, vocab_size, SAMPLING_EPS)
    row_ptr = logits_ptr + row * logits_stride
    list_ptr += row * CAPACITY
    state_ptr += row * 2 * STATE_SIZE
    low, high = tl.load(state_ptr), tl.load(state_ptr + 1)
    above, target = tl.load(state_ptr + 2), tl.load(state_ptr + 3)
    floor, largest = tl.load(state_ptr + 4), tl.load(state_ptr + 5)

    # The best of the tokens above the interval: the best tile once more, as in ops/gumbel.py.
    tile = best_tile(tile_max_ptr + row * num_tiles, num_tiles, NUM_TILES)
    token_ids = tile * TILE + tl.arange(0, TILE)
    logits = load_logits(row_ptr, token_ids, vocab_size)
    logits = tl.where((logits >= floor) & (logits > high), logits, -float("inf"))
    scores = token_scores(
        logits, token_ids, row, temperature_ptr, noise_keys_ptr, SAMPLING_EPS, APPROX_LOG
    )
    best_score = tl.max(scores)
    best = lowest_argmax(scores, token_ids, vocab_size - 1)

    if (k < vocab_size) | (p < 1):
        length = tl.load(list_len_ptr + row)
        # Of a list that overflowed nothing is used.
        num_listed = tl.where(length > CAPACITY, 0, length)
        length = tl.where(length > CAPACITY, vocab_size, length)
        # The threshold's key is in (key, high_key].
        key = _ordered_key(low).to(tl.int64)
        high_key = _ordered_key(tl.minimum(high, largest)).to(tl.int64)
        if k < vocab_size:
            key = _search(
                row_ptr, list_ptr, length, num_listed, low, high, floor, largest, temperature,
                key, high_key, above.to(tl.int64), k.to(tl.float64), True, NUM_PIVOTS, LIST_BLOCK,
            )  # fmt: skip
        if p < 1:
            base = _fixed_point(above)
            goal = _fixed_point(target).to(tl.float64)
            if k < vocab_size:
                # Of what top-k has left. The key itself is kept, so the search begins below it.
                key -= 1
                left = _measures_of_list(
                    row_ptr, list_ptr, length, num_listed, low, high, floor, largest, temperature,
                    tl.zeros([1], dtype=tl.int64) + key, base, False, 1, LIST_BLOCK,
                )  # fmt: skip
                goal = p.to(tl.float64) * tl.max(left).to(tl.float64)
            key = _search(
                row_ptr, list_ptr, length, num_listed, low, high, floor, largest, temperature,
                key, high_key, base, goal, False, NUM_PIVOTS, LIST_BLOCK,
            )  # fmt: skip
        for start in range(0, length, LIST_BLOCK):
            list_ids, list_logits, listed = _load_list(
                row_ptr, list_ptr, start, length, num_listed, low, high, floor, LIST_BLOCK
            )
            list_scores = token_scores(
                list_logits, list_ids, row, temperature_ptr, noise_keys_ptr, SAMPLING_EPS,
                APPROX_LOG,
            )  # fmt: skip
            kept = listed & (_ordered_key(list_logits) >= key)
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
def _pivot(high, reach, j: tl.constexpr, NUM_PIVOTS: tl.constexpr, ROUND: tl.constexpr):
    """Pivot j of a search that begins at `high` and goes down by `reach`.

    In round 0 they are closer to each other near the maximum, where a small k or a peaked row has
    its threshold, and the last one is below everything: it measures the whole row.
    """
    if ROUND == 0 and j == NUM_PIVOTS - 1:
        pivot = tl.full([], -float("inf"), dtype=tl.float32)
    elif ROUND == 0:
        pivot = tl.fma(-reach, ((j + 1) / (NUM_PIVOTS - 1)) * ((j + 1) / (NUM_PIVOTS - 1)), high)
    else:
        pivot = tl.fma(-reach, (j + 1) / (NUM_PIVOTS + 1), high)
    return pivot  # by fma, so that no compiler rounds the stored and the compared one differently


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
def _min_p_floor(log_min_p_ptr, row, largest, temperature):
    """The smallest logit that min-p allows; -inf if it allows all."""
    floor = -float("inf")
    if log_min_p_ptr is not None:
        floor = largest + temperature * tl.load(log_min_p_ptr + row)
    return floor


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
def _narrow(
    low,
    high,
    above,  # the measure above `high`
    target,
    k,
    p,
    vocab_size,
    pivots_ptr,
    measures_ptr,
    num_tiles,
    SET_TARGET: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    """The interval (low, high] between two pivots, from the measures of all tiles."""
    index = tl.arange(0, NUM_PIVOTS)
    tiles = tl.arange(0, NUM_TILES)[:, None]
    pivots = tl.load(pivots_ptr + index)
    parts = tl.load(
        measures_ptr + tiles * NUM_PIVOTS + index[None, :], mask=tiles < num_tiles, other=0.0
    )
    measures = tl.sum(parts, axis=0)
    if SET_TARGET:
        whole = tl.sum(tl.where(index == NUM_PIVOTS - 1, measures, 0.0))
        target = tl.where(k < vocab_size, k.to(tl.float32), p * whole)
    # Measures grow as pivots fall. All of a row may measure less than k: then nothing is cut.
    reached = measures >= target
    low = tl.maximum(low, tl.max(tl.where(reached, pivots, -float("inf"))))
    high = tl.minimum(high, tl.min(tl.where(reached, float("inf"), pivots)))
    above = tl.maximum(above, tl.max(tl.where(reached, 0.0, measures)))
    return low, high, above, target


@triton.jit
def _ordered_key(x):
    """An int32 per float32 in the same order; equal floats (-0 and 0) have equal keys."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load_list(
    row_ptr, list_ptr, start, length, num_listed, low, high, floor, LIST_BLOCK: tl.constexpr
):
    """A block of the list, or of the row where the list was too short: ids, logits, which count."""
    slots = start + tl.arange(0, LIST_BLOCK)
    valid = slots < length
    listed_ids = tl.load(list_ptr + slots, mask=slots < num_listed, other=0)
    token_ids = tl.where(slots < num_listed, listed_ids, slots)
    logits = tl.load(row_ptr + token_ids, mask=valid, other=-float("inf")).to(tl.float32)
    return token_ids, logits, (logits > low) & (logits <= high) & (logits >= floor)


@triton.jit
def _measures_of_list(
    row_ptr,
    list_ptr,
    length,
    num_listed,
    low,
    high,
    floor,
    largest,
    temperature,
    pivots,  # [NUM_PIVOTS] int64 keys
    base,
    BY_COUNT: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    """[NUM_PIVOTS] int64: base and the measure of the list above each pivot."""
    measures = tl.zeros([NUM_PIVOTS], dtype=tl.int64) + base
    for start in range(0, length, LIST_BLOCK):
        _, logits, listed = _load_list(
            row_ptr, list_ptr, start, length, num_listed, low, high, floor, LIST_BLOCK
        )
        weights = listed.to(tl.int64)
        if not BY_COUNT:
            mass = tl.where(listed, _weights(logits, largest, temperature), 0.0)
            weights = _fixed_point(mass)
        is_above = _ordered_key(logits).to(tl.int64)[None, :] > pivots[:, None]
        measures += tl.sum(tl.where(is_above, weights[None, :], 0), axis=1)
    return measures


@triton.jit
def _search(
    row_ptr,
    list_ptr,
    length,
    num_listed,
    low,
    high,
    floor,
    largest,
    temperature,
    low_key,
    high_key,
    base,
    target,
    BY_COUNT: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    """The smallest key in (low_key, high_key] whose measure is less than the target."""
    index = tl.arange(0, NUM_PIVOTS).to(tl.int64)
    while high_key - low_key > 1:
        pivots = low_key + (high_key - low_key) * (index + 1) // (NUM_PIVOTS + 1)
        measures = _measures_of_list(
            row_ptr, list_ptr, length, num_listed, low, high, floor, largest, temperature,
            pivots, base, BY_COUNT, NUM_PIVOTS, LIST_BLOCK,
        )  # fmt: skip
        # Never both unchanged, whatever the measures are: some pivot is inside the interval.
        reached = measures.to(tl.float64) >= target
        high_key = tl.minimum(high_key, tl.min(tl.where(reached, high_key, pivots)))
        low_key = tl.maximum(low_key, tl.max(tl.where(reached, pivots, low_key)))
    return high_key
