"""CustomOp: a layer whose computation is written twice, in torch and as a Triton kernel.

The torch code is the definition: it runs everywhere, and a debugger steps through it. The kernel
computes the same in one pass over memory, on a GPU. Which of the two runs is decided by where the
input is, here and nowhere else.

Upstream: vllm/model_executor/custom_op.py (0.23.0), which chooses when the layer is made and can
switch single ops on and off by configuration.
Left out: other platforms, registration by name, torch.compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nanovllm.triton_utils import use_triton


class CustomOp(nn.Module):
    """A layer with `forward_native` (torch) and `forward_cuda` (Triton), same arguments, same
    results up to rounding."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if use_triton(x):
            return self.forward_cuda(x, *args, **kwargs)
        return self.forward_native(x, *args, **kwargs)

    def forward_native(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward_cuda(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
