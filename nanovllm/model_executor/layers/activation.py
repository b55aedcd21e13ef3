"""Activation functions of the MLPs.

Upstream: vllm/model_executor/layers/activation.py (0.23.0)
Left out: the gated GELUs, squared ReLU and the fused kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.exceptions import VLLMValidationError


class SiluAndMul(nn.Module):
    """SwiGLU's gate: silu(gate) * up, on the output of the merged gate_up projection."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2 * d], gate first -> [..., d]"""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


# transformers' names. "gelu_new" and "gelu_fast" spell the tanh approximation out; it is the same
# function.
_ACTIVATIONS = {
    "gelu": lambda: nn.GELU(),
    "gelu_new": lambda: nn.GELU(approximate="tanh"),
    "gelu_fast": lambda: nn.GELU(approximate="tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": lambda: nn.ReLU(),
    "silu": lambda: nn.SiLU(),
}


def get_act_fn(act_fn_name: str) -> nn.Module:
    """The ungated activation that a config.json names.

    Raises:
        VLLMValidationError: the name is unknown.
    """
    if act_fn_name not in _ACTIVATIONS:
        raise VLLMValidationError(
            f"activation function {act_fn_name!r} is not supported; supported are "
            f"{', '.join(_ACTIVATIONS)}.",
            parameter="activation_function",
            value=act_fn_name,
        )
    return _ACTIVATIONS[act_fn_name]()


def get_act_and_mul_fn(act_fn_name: str) -> nn.Module:
    """The gated activation whose gate is the function that a config.json names.

    Raises:
        VLLMValidationError: the name is unknown.
    """
    if act_fn_name not in ("silu", "swish"):
        raise VLLMValidationError(
            f"gated activation function {act_fn_name!r} is not supported; supported is silu.",
            parameter="hidden_act",
            value=act_fn_name,
        )
    return SiluAndMul()
