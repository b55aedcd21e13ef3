"""RMS normalization, alone or together with the residual addition before it.

Upstream: vllm/model_executor/layers/layernorm.py and csrc/layernorm_kernels.cu (0.23.0), where the
fused addition overwrites its arguments; here results are new tensors.
Left out: Gemma's and the gated variants, quantized outputs.
"""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.model_executor.custom_op import CustomOp
from nanovllm.pdl import pdl_options
from nanovllm.triton_utils import tl, triton


class RMSNorm(CustomOp):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    A decoder layer adds its output to the residual stream, and the next layer normalizes the sum.
    Both read and write the whole stream, so they are fused: `forward(x, residual)` adds and
    normalizes, and hands back the sum as the new residual. This is why decoder layers pass a pair
    (hidden_states, residual) on.

    Rounding is that of transformers and of upstream's CUDA kernel: the sum is rounded to the
    model's dtype, the normalization runs in float32 on the rounded sum, and its result is rounded
    again before it is multiplied by the weight.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.ones(hidden_size), requires_grad=False)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        x_float = x.to(torch.float32)
        variance = x_float.pow(2).mean(dim=-1, keepdim=True)
        return (x_float * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype) * self.weight

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[..., hidden_size] -> [..., hidden_size], or (normalized x + residual, x + residual)."""
        if residual is None:
            return self._norm(x)
        residual = x + residual
        return self._norm(residual), residual

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As forward_native."""
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon)
        return fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)


@triton.jit
def round_norm(x, rstd, weight):
    """x * rstd * weight, rounded to the weight's dtype after each multiplication."""
    normalized = (x.to(tl.float32) * rstd).to(weight.dtype)
    return (normalized.to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,  # [num_rows, HIDDEN_SIZE]
    residual_ptr,  # the same, or None: nothing is added
    weight_ptr,  # [HIDDEN_SIZE]
    out_ptr,  # [num_rows, HIDDEN_SIZE]
    sum_ptr,  # the same, or None
    num_rows,
    eps,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # HIDDEN_SIZE or the power of two above it
    ROWS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program normalizes ROWS rows, each of which it holds whole."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_SIZE)
    weight = tl.load(weight_ptr + cols, mask=cols < HIDDEN_SIZE, other=0.0)
    offsets = rows[:, None] * HIDDEN_SIZE + cols[None, :]
    mask = (rows < num_rows)[:, None] & (cols < HIDDEN_SIZE)[None, :]
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + offsets, x, mask=mask)
    x_float = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x_float * x_float, axis=1) / HIDDEN_SIZE + eps)
    tl.store(out_ptr + offsets, round_norm(x, rstd[:, None], weight[None, :]), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, use_pdl: bool | None = None
) -> torch.Tensor:
    """The normalized x, [..., hidden_size]; bfloat16, float16 or float32, as the weight."""
    return _launch(x, None, weight, eps, use_pdl)[0]


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    use_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalized x + residual, x + residual), [..., hidden_size] each."""
    out, residual_out = _launch(x, residual, weight, eps, use_pdl)
    assert residual_out is not None
    return out, residual_out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    use_pdl: bool | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A thread holds 8 to 32 numbers of a row. Narrow rows (the heads of Qwen3's q_norm) share a
    program: a program per 64 numbers would have two a thread."""
    hidden_size = x.shape[-1]
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    residual_out = None if residual is None else torch.empty_like(x)
    if x.numel() == 0:
        return out, residual_out
    num_rows = x.numel() // hidden_size
    block_size = triton.next_power_of_2(hidden_size)
    rows = max(1, min(1024 // block_size, triton.next_power_of_2(num_rows)))
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        residual,
        weight,
        out,
        residual_out,
        num_rows,
        eps,
        HIDDEN_SIZE=hidden_size,
        BLOCK_SIZE=block_size,
        ROWS=rows,
        num_warps=min(16, max(1, rows * block_size // 256)),
        **pdl_options(x.device, use_pdl),
    )
    return out, residual_out
