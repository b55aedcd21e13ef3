"""RMS normalization, alone or together with the residual addition before it.

Upstream: vllm/model_executor/layers/layernorm.py (0.23.0)
Left out: Gemma's and the gated variants, fused kernels.
"""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    A decoder layer adds its output to the residual stream, and the next layer normalizes the sum.
    Both read and write the whole stream, so upstream fuses them: `forward(x, residual)` adds and
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

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[..., hidden_size] -> [..., hidden_size], or (normalized x + residual, x + residual)."""
        if residual is None:
            return self._norm(x)
        residual = x + residual
        return self._norm(residual), residual
