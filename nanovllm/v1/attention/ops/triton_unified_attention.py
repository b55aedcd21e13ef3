"""Attention of a packed batch over the paged KV cache: prompt, chunk and decode rows.

A program holds a tile of query rows and walks over the keys and values that they see, one tile of
tokens after the other, through the block table. The scores of a tile never leave the chip: of all
tiles so far only the running maximum, the sum of exponentials and the weighted sum of values are
kept for every row, and rescaled when the maximum grows (online softmax). Query heads that share a
key head are rows of one tile, so that keys and values are read once for all of them.

    kind             rows of a tile                    what limits it       so
    prompt, chunk    BLOCK_Q tokens x group of heads   arithmetic           large tiles, and masks
                                                                            on the diagonal only
    decode           1 token x group of heads          reading the cache    contexts are cut into
                                                                            segments, a program
                                                                            each, if requests are
                                                                            too few to keep the
                                                                            device busy

Both kinds run the same `attend`; a mixed batch is two launches, and each leaves the other's rows
alone. How many segments a context has is decided on the device, by its length: what the host
chooses depends on the number of requests only, so that a CUDA graph can be replayed for any batch
of its size.

Upstream: vllm/v1/attention/ops/triton_unified_attention.py (0.23.0), one kernel whose query blocks
find their request by binary search, and a second kernel that sums up segments. Here the host lists
the query blocks, and the segment that ends last sums up.
Left out: sliding windows, ALiBi, soft caps, sinks, quantized caches; segments for prompt rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.pdl import pdl_options
from nanovllm.triton_utils import tl, triton

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E), and exp2 is what the hardware has


@triton.jit
def load_tile(ptrs, in_context, in_head, MASKED: tl.constexpr):
    """[TILE, head] values; 0 outside of context and head, where memory may hold NaN."""
    if MASKED:
        return tl.load(ptrs, mask=in_context[:, None] & in_head[None, :], other=0.0)
    return tl.load(ptrs)


@triton.jit
def attend(
    q,  # [BLOCK_M, HEAD_SIZE_PADDED]
    acc,  # [BLOCK_M, HEAD_SIZE_PADDED] float32, sum of exp2(score - row_max) * value
    row_max,  # [BLOCK_M] float32, of the scores in base 2
    row_sum,  # [BLOCK_M] float32, sum of exp2(score - row_max)
    kv_head_ptr,  # the layer's cache, at this key head
    block_table_ptr,  # the request's row
    first_tile,
    end_tile,
    context_end,  # tokens from here on are not read if MASKED
    positions,  # [BLOCK_M], the last token that each row sees if MASKED
    qk_scale,  # of the scores, times log2(e)
    TOKEN_STRIDE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    USE_DOT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Take the tokens of tiles first_tile..end_tile-1 into acc, row_max and row_sum.

    Without MASKED every row must see every token of these tiles.
    """
    PARTIAL: tl.constexpr = MASKED or HEAD_SIZE != HEAD_SIZE_PADDED
    dims = tl.arange(0, HEAD_SIZE_PADDED)
    in_head = dims < HEAD_SIZE
    for tile in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
        tokens = tile * TILE + tl.arange(0, TILE)
        in_context = tokens < context_end
        if BLOCK_SIZE % TILE == 0:
            block_ids = tl.load(block_table_ptr + tile * TILE // BLOCK_SIZE)
        elif MASKED:
            block_ids = tl.load(block_table_ptr + tokens // BLOCK_SIZE, mask=in_context, other=0)
        else:
            block_ids = tl.load(block_table_ptr + tokens // BLOCK_SIZE)
        # A block is BLOCK_SIZE rows of keys, then as many of values.
        rows = block_ids.to(tl.int64) * (2 * BLOCK_SIZE) + tokens % BLOCK_SIZE
        k_ptrs = kv_head_ptr + rows[:, None] * TOKEN_STRIDE + dims[None, :]

        k = load_tile(k_ptrs, in_context, in_head, PARTIAL)
        if USE_DOT:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.sum(q[:, None, :].to(tl.float32) * k[None, :, :].to(tl.float32), axis=2)
        if MASKED:
            scores = tl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
        # The scale is positive, so it may follow the maximum. Row_max is finite from the first tile
        # on: every row sees a token there.
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * qk_scale)
        p = tl.exp2(scores * qk_scale - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, axis=1)
        row_max = new_max

        v = load_tile(k_ptrs + BLOCK_SIZE * TOKEN_STRIDE, in_context, in_head, PARTIAL)
        acc = acc * rescale[:, None]
        if USE_DOT:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        else:
            acc += tl.sum(p[:, :, None] * v[None, :, :].to(tl.float32), axis=1)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["stride_block_table"])
def kernel_prefill_attention(
    output_ptr,
    query_ptr,
    kv_cache_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    query_blocks_ptr,  # [num_query_blocks, 2] int32: request, first token (within its query)
    qk_scale,
    stride_query_token,
    stride_query_head,
    stride_output_token,
    stride_block_table,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one query block (BLOCK_M // GROUP tokens of a request), one key head."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    query_block_ptr = query_blocks_ptr + 2 * tl.program_id(1)
    req = tl.load(query_block_ptr)
    first_token = tl.load(query_block_ptr + 1)
    query_start = tl.load(query_start_loc_ptr + req)
    query_len = tl.load(query_start_loc_ptr + req + 1) - query_start
    context_len = tl.load(seq_lens_ptr + req) - query_len  # before this step's tokens

    rows = tl.arange(0, BLOCK_M)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, HEAD_SIZE_PADDED)
    # BLOCK_M need not be a multiple of GROUP; what is left over is nobody's row.
    is_row = (rows < BLOCK_Q * GROUP) & (tokens < query_len)
    mask = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
    batch_tokens = (query_start + tokens).to(tl.int64)
    q = tl.load(
        query_ptr
        + (batch_tokens * stride_query_token + heads * stride_query_head)[:, None]
        + dims[None, :],
        mask=mask,
        other=0.0,
    )
    acc = tl.zeros([BLOCK_M, HEAD_SIZE_PADDED], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    # Tiles below the diagonal are seen whole by all rows; the others are masked.
    context_end = context_len + tl.minimum(first_token + BLOCK_Q, query_len)
    num_full_tiles = (context_len + first_token + 1) // TILE
    kv_head_ptr = kv_cache_ptr + kv_head * HEAD_SIZE
    block_table_ptr += req.to(tl.int64) * stride_block_table
    for masked in tl.static_range(2):
        acc, row_max, row_sum = attend(
            q,
            acc,
            row_max,
            row_sum,
            kv_head_ptr,
            block_table_ptr,
            num_full_tiles if masked else 0,
            tl.cdiv(context_end, TILE) if masked else num_full_tiles,
            context_end,
            context_len + tokens,
            qk_scale,
            NUM_KV_HEADS * HEAD_SIZE,
            HEAD_SIZE,
            HEAD_SIZE_PADDED,
            BLOCK_SIZE,
            TILE,
            masked == 1,
            True,
            NUM_STAGES,
        )

    out = (acc / row_sum[:, None]).to(output_ptr.dtype.element_ty)
    tl.store(
        output_ptr
        + (batch_tokens * stride_output_token + heads * HEAD_SIZE)[:, None]
        + dims[None, :],
        out,
        mask=mask,
    )


@triton.jit(do_not_specialize=["stride_block_table", "min_segment_tiles"])
def kernel_decode_attention(
    output_ptr,
    query_ptr,
    kv_cache_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    req_order_ptr,  # [num_reqs] int32
    # Of NUM_SEGMENTS > 1, float32:
    segm_output_ptr,  # [num_reqs, num_heads, NUM_SEGMENTS, HEAD_SIZE_PADDED]
    segm_max_ptr,  # [num_reqs, num_heads, NUM_SEGMENTS]
    segm_expsum_ptr,  # [num_reqs, num_heads, NUM_SEGMENTS]
    segm_arrivals_ptr,  # [num_reqs, NUM_KV_HEADS] int32, 0 before and after
    qk_scale,
    stride_query_token,
    stride_query_head,
    stride_output_token,
    stride_block_table,
    min_segment_tiles,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,  # a power of two
    USE_DOT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: one request, one key head, one segment of the context.

    Programs start in about the order of their numbers, a few hundred at a time, and `req_order`
    says whose turn it is: long contexts begin first, so that no long one is left running alone.

    Requests that compute another number of tokens than 1 are left alone: the other kernel's, and
    rows that pad the batch.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0)
    req = tl.load(req_order_ptr + tl.program_id(1))
    segment = tl.program_id(2)
    query_start = tl.load(query_start_loc_ptr + req)
    if tl.load(query_start_loc_ptr + req + 1) - query_start != 1:
        return
    seq_len = tl.load(seq_lens_ptr + req)
    num_tiles = tl.cdiv(seq_len, TILE)
    segment_tiles = tl.maximum(tl.cdiv(num_tiles, NUM_SEGMENTS), min_segment_tiles)
    first_tile = segment * segment_tiles
    if first_tile >= num_tiles:
        return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_SIZE_PADDED)
    heads = kv_head * GROUP + rows
    mask = (rows < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    query_ptr += query_start.to(tl.int64) * stride_query_token
    output_ptr += query_start.to(tl.int64) * stride_output_token
    q = tl.load(
        query_ptr + heads[:, None] * stride_query_head + dims[None, :], mask=mask, other=0.0
    )
    acc = tl.zeros([BLOCK_M, HEAD_SIZE_PADDED], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc, row_max, row_sum = attend(
        q,
        acc,
        row_max,
        row_sum,
        kv_cache_ptr + kv_head * HEAD_SIZE,
        block_table_ptr + req.to(tl.int64) * stride_block_table,
        first_tile,
        tl.minimum(first_tile + segment_tiles, num_tiles),
        seq_len,
        tl.full([BLOCK_M], 0, dtype=tl.int32) + seq_len - 1,
        qk_scale,
        NUM_KV_HEADS * HEAD_SIZE,
        HEAD_SIZE,
        HEAD_SIZE_PADDED,
        BLOCK_SIZE,
        TILE,
        True,
        USE_DOT,
        NUM_STAGES,
    )

    num_segments = tl.cdiv(num_tiles, segment_tiles)
    if num_segments == 1:
        out = (acc / row_sum[:, None]).to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + heads[:, None] * HEAD_SIZE + dims[None, :], out, mask=mask)
    elif NUM_SEGMENTS > 1:
        # Each head's segments stand side by side.
        segm_rows = (req * NUM_KV_HEADS * GROUP + heads) * NUM_SEGMENTS + segment
        tl.store(segm_max_ptr + segm_rows, row_max, mask=rows < GROUP)
        tl.store(segm_expsum_ptr + segm_rows, row_sum, mask=rows < GROUP)
        tl.store(
            segm_output_ptr + segm_rows[:, None] * HEAD_SIZE_PADDED + dims[None, :],
            acc,
            mask=(rows < GROUP)[:, None],
        )
        tl.debug_barrier()  # all threads have stored; the atomic publishes it to the device
        arrivals_ptr = segm_arrivals_ptr + req * NUM_KV_HEADS + kv_head
        if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == num_segments - 1:
            # The last one to arrive: everyone else's sums are there.
            reduce_segments(
                output_ptr + kv_head * GROUP * HEAD_SIZE,
                segm_output_ptr,
                segm_max_ptr,
                segm_expsum_ptr,
                (req * NUM_KV_HEADS + kv_head) * GROUP,
                num_segments,
                GROUP,
                HEAD_SIZE,
                HEAD_SIZE_PADDED,
                NUM_SEGMENTS,
            )
            tl.store(arrivals_ptr, 0)


@triton.jit
def reduce_segments(
    output_ptr,  # at the first head
    segm_output_ptr,
    segm_max_ptr,
    segm_expsum_ptr,
    first_row,  # of the segments' sums
    num_segments,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
):
    """Bring each head's segments to a common maximum, add up, divide."""
    segments = tl.arange(0, NUM_SEGMENTS)
    dims = tl.arange(0, HEAD_SIZE_PADDED)
    exists = segments < num_segments
    for head in tl.static_range(GROUP):
        segm_rows = (first_row + head) * NUM_SEGMENTS + segments
        row_max = tl.load(segm_max_ptr + segm_rows, mask=exists, other=float("-inf"))
        row_sum = tl.load(segm_expsum_ptr + segm_rows, mask=exists, other=0.0)
        acc = tl.load(
            segm_output_ptr + segm_rows[:, None] * HEAD_SIZE_PADDED + dims[None, :],
            mask=exists[:, None],
            other=0.0,
        )
        weight = tl.exp2(row_max - tl.max(row_max, axis=0))
        out = tl.sum(acc * weight[:, None], axis=0) / tl.sum(row_sum * weight, axis=0)
        tl.store(
            output_ptr + head * HEAD_SIZE + dims,
            out.to(output_ptr.dtype.element_ty),
            mask=dims < HEAD_SIZE,
        )


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel is compiled and launched."""

    tile: int  # tokens
    num_warps: int
    num_stages: int
    num_segments: int  # at most so many a request and key head; a power of two
    min_segment_tokens: int  # a context is not cut into less
    # Products on tensor cores, the group padded to 16 rows; or sums of 3-D tiles.
    use_dot: bool = True


@dataclass(frozen=True)
class PrefillConfig:
    """How the prompt and chunk kernel is compiled."""

    block_m: int  # query rows (tokens x group of heads)
    tile: int  # tokens
    num_warps: int
    num_stages: int


# Programs that the device should have, for each of its multiprocessors, before contexts are left
# whole.
DECODE_PROGRAMS_PER_SM = 4
MAX_SEGMENTS = 32


def get_num_segments(num_reqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Into how many segments at most a decode batch of this size cuts a context."""
    missing = DECODE_PROGRAMS_PER_SM * num_sms // max(num_reqs * num_kv_heads, 1)
    # The power of two below, so that nothing but the batch's size can make programs queue.
    return min(1 << max(missing, 1).bit_length() - 1, MAX_SEGMENTS)


def get_decode_config(
    num_reqs: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, num_sms: int
) -> DecodeConfig:
    """Tuned on an H200 by scripts/tune_attention.py, for bfloat16 heads of 128."""
    row_bytes = triton.next_power_of_2(head_size) * dtype.itemsize
    return DecodeConfig(
        tile=64 if row_bytes < 512 else 32,
        num_warps=2,
        num_stages=3,
        num_segments=get_num_segments(num_reqs, num_kv_heads, num_sms),
        min_segment_tokens=64,
    )


def get_prefill_config(
    max_query_len: int, group: int, head_size: int, dtype: torch.dtype
) -> PrefillConfig:
    """Tuned on an H200 by scripts/tune_attention.py, for bfloat16 heads of 128."""
    padded = padded_head_size(head_size)
    min_block_m = triton.next_power_of_2(group)  # one token
    if dtype == torch.float32:  # without tensor cores registers are what is short
        return PrefillConfig(max(32 if padded <= 128 else 16, min_block_m), 16, 4, 1)
    if padded > 128:
        return PrefillConfig(max(64, min_block_m), 64, 8, 2)
    if max_query_len * group <= 64:  # a block of 128 would be half empty
        return PrefillConfig(max(64, min_block_m), 64, 4, 3)
    return PrefillConfig(max(128, min_block_m), 64, 4, 3)


@dataclass
class Segments:
    """Where the segments of a batch leave their sums; shared by all layers."""

    segm_output: torch.Tensor  # [num_reqs * num_heads * NUM_SEGMENTS * head_size_padded] float32
    segm_max: torch.Tensor  # [num_reqs * num_heads * NUM_SEGMENTS] float32
    segm_expsum: torch.Tensor  # [num_reqs * num_heads * NUM_SEGMENTS] float32
    segm_arrivals: torch.Tensor  # [num_reqs * num_kv_heads] int32, 0 between launches

    @classmethod
    def allocate(
        cls,
        num_reqs: int,
        max_requests_segments: int,  # num_reqs * num_segments, the largest of all batch sizes
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        device: torch.device,
    ) -> Segments:
        num_rows = max_requests_segments * num_heads
        return cls(
            torch.empty(num_rows * padded_head_size(head_size), device=device),
            torch.empty(num_rows, device=device),
            torch.empty(num_rows, device=device),
            torch.zeros(num_reqs * num_kv_heads, dtype=torch.int32, device=device),
        )


def padded_head_size(head_size: int) -> int:
    return max(triton.next_power_of_2(head_size), 16)  # tl.dot takes no less


def decode_attention(
    output: torch.Tensor,  # [num_tokens, num_heads, head_size], contiguous
    query: torch.Tensor,  # [num_tokens, num_heads, head_size], each head contiguous
    kv_cache: torch.Tensor,  # [num_blocks, 2, block_size, num_kv_heads, head_size], contiguous
    query_start_loc: torch.Tensor,  # [num_reqs + 1] int32
    seq_lens: torch.Tensor,  # [num_reqs] int32
    block_table: torch.Tensor,  # [num_reqs, max_num_blocks_per_req] int32, rows contiguous
    req_order: torch.Tensor,  # [num_reqs] int32, a permutation: who starts first
    scale: float,
    config: DecodeConfig,
    segments: Segments,
    use_pdl: bool | None = None,
) -> None:
    """Fill the output rows of requests that compute one token; others are not touched."""
    _, _, block_size, num_kv_heads, head_size = kv_cache.shape
    num_reqs, group = len(seq_lens), query.shape[1] // num_kv_heads
    kernel_decode_attention[(num_kv_heads, num_reqs, config.num_segments)](
        output,
        query,
        kv_cache,
        query_start_loc,
        seq_lens,
        block_table,
        req_order,
        segments.segm_output,
        segments.segm_max,
        segments.segm_expsum,
        segments.segm_arrivals,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        output.stride(0),
        block_table.stride(0),
        -(-config.min_segment_tokens // config.tile),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        HEAD_SIZE_PADDED=padded_head_size(head_size),
        BLOCK_SIZE=block_size,
        BLOCK_M=max(triton.next_power_of_2(group), 16 if config.use_dot else 1),
        TILE=config.tile,
        NUM_SEGMENTS=config.num_segments,
        USE_DOT=config.use_dot,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        **pdl_options(query.device, use_pdl),
    )


def prefill_attention(
    output: torch.Tensor,  # as in decode_attention
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    query_blocks: torch.Tensor,  # [num_query_blocks, 2] int32: request, first token in its query
    scale: float,
    config: PrefillConfig,
    use_pdl: bool | None = None,
) -> None:
    """Fill the output rows of the query blocks, block_m // group tokens each."""
    _, _, block_size, num_kv_heads, head_size = kv_cache.shape
    kernel_prefill_attention[(num_kv_heads, len(query_blocks))](
        output,
        query,
        kv_cache,
        query_start_loc,
        seq_lens,
        block_table,
        query_blocks,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        output.stride(0),
        block_table.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=query.shape[1] // num_kv_heads,
        HEAD_SIZE=head_size,
        HEAD_SIZE_PADDED=padded_head_size(head_size),
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        TILE=config.tile,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        **pdl_options(query.device, use_pdl),
    )
