"""Linear layers of a few rows: the weight is streamed once, at the speed of memory.

With one token a linear layer does two operations on each weight it reads, so its time is that of
reading the weight: 2 us for 8 MB at an H200's 4.5 TB/s. In so short a time what counts is that all
multiprocessors ask for their part at once, and that there are few kernels. So

- a program owns BLOCK_N rows of the weight and asks for all of them, whole, before it does anything
  else: they wait in its registers. With programmatic dependent launch that is before the kernel
  that computes x has ended;
- what stands between two linear layers is done by their kernels. Before: RMSNorm of x; every
  program does it again, x is small. After: bias, and residual addition or SiLU and multiplication,
  in the program that has the result.

A decoder layer (weights in brackets) is then

    qkv = norm(h) [qkv]                      rotation, cache and attention make a of it
    h   = h + a [o]
    act = silu_and_mul(norm(h) [gate_up])
    h   = h + act [down]

Rounding is that of the separate layers: results of each go through the model's dtype, sums are in
float32. Only the order of additions differs.

Upstream: csrc/rocm/skinny_gemms.cu (0.23.0), for AMD's GPUs and without the fusion.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.model_executor.layers.layernorm import RMSNorm, round_norm
from nanovllm.pdl import pdl_options
from nanovllm.triton_utils import num_compute_units, tl, triton, use_triton

# Up to how many rows it is used; scripts/bench_fused_ops.py measures against cuBLAS.
SKINNY_MAX_ROWS = 8
MAX_TILE_BYTES = 65536  # of the weight, a program; they wait in its registers
# Tensor cores read the weight from shared memory, at least 16 rows of it.
MAX_DOT_TILE_BYTES = 131072


def use_skinny_linear(x: torch.Tensor) -> bool:
    """Whether `skinny_linear` runs its kernel on x [..., input_size]: a few rows, on a GPU, and not
    too wide for a program to hold as many rows of the weight as it needs."""
    num_rows, row_bytes = x.numel() // x.shape[-1], x.shape[-1] * x.element_size()
    return (
        use_triton(x)
        and 0 < num_rows <= SKINNY_MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and row_bytes <= (MAX_TILE_BYTES // 2 if num_rows == 1 else MAX_DOT_TILE_BYTES // 16)
    )


class SkinnyConfig(NamedTuple):
    """How a skinny linear layer is cut up.

    block_n: rows of the weight a program; with `silu_and_mul` half of them gate, half up.
    block_k: columns loaded at a time; the program's warps lie along them.
    num_warps: of a program.
    use_dot: tensor cores, for 2 rows and more, or multiplications and a sum, row by row.
    """

    block_n: int
    block_k: int
    num_warps: int
    use_dot: bool


def get_skinny_config(
    num_rows: int, weight_rows: int, input_size: int, element_size: int, num_sms: int
) -> SkinnyConfig:
    """The best of scripts/bench_fused_ops.py's sweep on an H200, or within a few percent of it.

    One row: 8 rows of the weight a program, two a warp, 16 bytes a thread at a time: then x, too,
    is where it is needed, and no thread asks another for it. More rows: tensor cores.
    """
    num_warps, use_dot = 4, num_rows > 1 and element_size == 2
    block_n, fewest, tile_bytes = (
        (32, 16, MAX_DOT_TILE_BYTES) if use_dot else (8, 2, MAX_TILE_BYTES)
    )
    # Fewer where they would not fit, or would leave half of the multiprocessors without work.
    while block_n > fewest and (
        block_n * input_size * element_size > tile_bytes or weight_rows < block_n * num_sms // 2
    ):
        block_n //= 2
    if use_dot:
        block_k = 16384 // block_n
    else:
        warps_along_k = 1 if block_n >= num_warps else num_warps
        block_k = 32 * (16 // element_size) * warps_along_k
    return SkinnyConfig(block_n, block_k, num_warps, use_dot)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: RMSNorm | None = None,
    silu_and_mul: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer with what is before and after it: one kernel where `use_skinny_linear`, else
    one operation after the other.

    Args:
        x: [..., input_size].
        weight: [n, input_size], contiguous.
        bias: [n].
        norm: applied to x first.
        silu_and_mul: the first half of the n outputs is gate, the second up, and the result is
            silu(gate) * up. Not together with `residual`.
        residual: [..., n], added to the result.

    Returns:
        [..., n], or [..., n / 2] with `silu_and_mul`: a new tensor.
    """
    function = skinny_linear_cuda if use_skinny_linear(x) else skinny_linear_native
    return function(x, weight, bias, norm=norm, silu_and_mul=silu_and_mul, residual=residual)


def skinny_linear_native(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: RMSNorm | None = None,
    silu_and_mul: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition."""
    if norm is not None:
        x = norm(x)
    y = F.linear(x, weight, bias)
    if silu_and_mul:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


def skinny_linear_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: RMSNorm | None = None,
    silu_and_mul: bool = False,
    residual: torch.Tensor | None = None,
    config: SkinnyConfig | None = None,
    use_pdl: bool | None = None,
) -> torch.Tensor:
    """The kernel. `config` None: `get_skinny_config` decides; `use_pdl`: see `pdl_options`."""
    assert not (silu_and_mul and residual is not None) and weight.is_contiguous()
    weight_rows, input_size = weight.shape
    output_size = weight_rows // 2 if silu_and_mul else weight_rows
    out = torch.empty((*x.shape[:-1], output_size), dtype=x.dtype, device=x.device)
    x = x.reshape(-1, input_size)
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows = x.shape[0]
    if num_rows == 0:
        return out
    if config is None:
        config = get_skinny_config(
            num_rows, weight_rows, input_size, x.element_size(), num_compute_units(x.device)
        )
    block_m = triton.next_power_of_2(num_rows)
    block_m = max(block_m, 8) if config.use_dot else block_m
    kernel = skinny_dot_kernel if config.use_dot else skinny_gemv_kernel
    kernel[(triton.cdiv(weight_rows, config.block_n),)](
        x,
        weight,
        bias,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.variance_epsilon,
        None if residual is None else residual.contiguous(),
        out,
        num_rows,
        weight_rows,
        x.stride(0),
        K=input_size,
        SILU_AND_MUL=silu_and_mul,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        NUM_CHUNKS=triton.cdiv(input_size, config.block_k),
        NUM_WARPS=config.num_warps,
        num_warps=config.num_warps,
        **pdl_options(x.device, use_pdl),
    )
    return out


@triton.jit
def _weight_row(n, N, SILU_AND_MUL: tl.constexpr):
    """The row of the weight that gives output n: with SILU_AND_MUL gates and ups take turns, so
    that a program has both of a pair."""
    if SILU_AND_MUL:
        return n // 2 + n % 2 * (N // 2)
    return n


@triton.jit
def _silu_and_mul(gate, up):
    """Rounded after the one and after the other, as torch does."""
    gate_float = gate.to(tl.float32)
    silu = (gate_float / (1.0 + tl.exp(-gate_float))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def skinny_gemv_kernel(
    x_ptr,  # [num_rows, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N] or None
    norm_weight_ptr,  # [K] or None
    eps,
    residual_ptr,  # [num_rows, N] or None
    out_ptr,  # [num_rows, N], or [num_rows, N / 2] with SILU_AND_MUL
    num_rows,
    N,
    x_stride,
    K: tl.constexpr,
    SILU_AND_MUL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,  # of BLOCK_K columns, to cover K
    NUM_WARPS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: BLOCK_N outputs of all rows, by multiplying and adding up."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    row = _weight_row(n, N, SILU_AND_MUL)
    row_ptrs = weight_ptr + row.to(tl.int64)[:, None] * K
    weights = ()
    norm_weights = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        k = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = n_mask[:, None] & (k < K)[None, :]
        # Each weight is read once in a step: it need not push activations out of the L2 cache.
        w = tl.load(row_ptrs + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        weights += (w,)  # type: ignore[assignment]
        if norm_weight_ptr is not None:
            norm_weight = tl.load(norm_weight_ptr + k, mask=k < K, other=0.0)
            norm_weights += (norm_weight,)  # type: ignore[assignment]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + row, mask=n_mask, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()

    for m in tl.static_range(BLOCK_M):
        # A row that is not there has no columns and no outputs.
        num_columns = tl.where(m < num_rows, K, 0)
        num_outputs = tl.where(m < num_rows, N, 0)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + m * N + n, mask=n < num_outputs, other=0.0)
        xs = ()
        squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
        for chunk in tl.static_range(NUM_CHUNKS):
            k = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + m * x_stride + k, mask=k < num_columns, other=0.0)
            squares += x.to(tl.float32) * x.to(tl.float32)
            xs += (x,)  # type: ignore[assignment]
        if norm_weight_ptr is not None:
            rstd = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        products = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        for chunk in tl.static_range(NUM_CHUNKS):
            x = xs[chunk]
            if norm_weight_ptr is not None:
                x = round_norm(x, rstd, norm_weights[chunk])
            products += weights[chunk].to(tl.float32) * x.to(tl.float32)[None, :]

        y = tl.sum(products, axis=1)
        if bias_ptr is not None:
            y += bias.to(tl.float32)
        y = y.to(out_ptr.dtype.element_ty)
        if residual_ptr is not None:
            y = (residual.to(tl.float32) + y.to(tl.float32)).to(y.dtype)
        if SILU_AND_MUL:
            gate, up = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
            pair = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            out_ptrs = out_ptr + m * (N // 2) + pair
            tl.store(out_ptrs, _silu_and_mul(gate, up), mask=pair * 2 < num_outputs)
        else:
            tl.store(out_ptr + m * N + n, y, mask=n < num_outputs)


@triton.jit(do_not_specialize=["num_rows"])
def skinny_dot_kernel(
    x_ptr,  # as in skinny_gemv_kernel
    weight_ptr,
    bias_ptr,
    norm_weight_ptr,
    eps,
    residual_ptr,
    out_ptr,
    num_rows,
    N,
    x_stride,
    K: tl.constexpr,
    SILU_AND_MUL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The same by tensor cores: the weight is the left factor, the rows of x are columns.

    Their smallest tile, 16 outputs of 8 rows, is one warp's work. So each of NUM_WARPS parts of a
    chunk is a matrix multiplication of its own in a batch, which Triton hands out to the warps.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PART_K: tl.constexpr = BLOCK_K // NUM_WARPS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    row = _weight_row(n, N, SILU_AND_MUL)
    row_ptrs = weight_ptr + row.to(tl.int64)[None, :, None] * K
    # [NUM_WARPS, PART_K]
    columns = tl.arange(0, NUM_WARPS)[:, None] * PART_K + tl.arange(0, PART_K)[None, :]
    weights = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        k = (chunk * BLOCK_K + columns)[:, None, :]
        mask = n_mask[None, :, None] & (k < K)
        w = tl.load(row_ptrs + k, mask=mask, other=0.0, eviction_policy="evict_first")
        weights += (w,)  # type: ignore[assignment]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + row, mask=n_mask, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()

    m = tl.arange(0, BLOCK_M)
    m_mask = m < num_rows
    mask = n_mask[:, None] & m_mask[None, :]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + m[None, :] * N + n[:, None], mask=mask, other=0.0)
    x_ptrs = x_ptr + m[None, None, :] * x_stride
    if norm_weight_ptr is not None:
        squares = tl.zeros((NUM_WARPS, PART_K, BLOCK_M), dtype=tl.float32)
        for chunk in tl.static_range(NUM_CHUNKS):
            k = (chunk * BLOCK_K + columns)[:, :, None]
            x = tl.load(x_ptrs + k, mask=m_mask[None, None, :] & (k < K), other=0.0)
            squares += x.to(tl.float32) * x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + eps)[None, None, :]
    sums = tl.zeros((NUM_WARPS, BLOCK_N, BLOCK_M), dtype=tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        k = (chunk * BLOCK_K + columns)[:, :, None]
        x = tl.load(x_ptrs + k, mask=m_mask[None, None, :] & (k < K), other=0.0)
        if norm_weight_ptr is not None:
            x = round_norm(x, rstd, tl.load(norm_weight_ptr + k, mask=k < K, other=0.0))
        sums = tl.dot(weights[chunk], x, sums, input_precision="ieee")

    y = tl.sum(sums, axis=0)
    if bias_ptr is not None:
        y += bias.to(tl.float32)[:, None]
    y = y.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    if SILU_AND_MUL:
        pairs = tl.permute(tl.reshape(y, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1))
        gate, up = tl.split(pairs)
        pair = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_ptrs = out_ptr + m[None, :] * (N // 2) + pair[:, None]
        mask = (pair * 2 < N)[:, None] & m_mask[None, :]
        tl.store(out_ptrs, _silu_and_mul(gate, up), mask=mask)
    else:
        tl.store(out_ptr + m[None, :] * N + n[:, None], y, mask=mask)
