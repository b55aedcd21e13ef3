"""Activation functions of the MLPs.

What torch has is taken from torch. The formulas with their derivatives, and what each function does
to a trained model, are in nanovllm/lab/activations.py.

SwiGLU's gate reads two numbers and writes one for each of its results, with a handful of operations
between: its time is that of the memory. Torch writes silu(gate) out and reads it again; the fused
kernel keeps it in registers.

    bytes moved, bfloat16, for each result     needed    native (silu, then mul)
    gate, up and result                             6                          6
    silu(gate), written and read                    0                          4

Upstream: vllm/model_executor/layers/activation.py (0.23.0), whose fused kernels are CUDA.
Left out: the gated GELUs, squared ReLU and other rarer functions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanovllm.exceptions import VLLMValidationError
from nanovllm.model_executor.custom_op import CustomOp
from nanovllm.triton_utils import tl, triton


class SiluAndMul(CustomOp):
    """SwiGLU's gate: silu(gate) * up, on the output of the merged gate_up projection."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2 * d], gate first -> [..., d]"""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2 * d], gate first -> [..., d]"""
        return silu_and_mul(x)


@triton.jit
def silu_and_mul_kernel(
    x_ptr,  # [num_rows, 2 * d]
    out_ptr,  # [num_rows, d]
    d,
    BLOCK_SIZE: tl.constexpr,
):
    """One program computes BLOCK_SIZE results of one row."""
    row = tl.program_id(0).to(tl.int64)  # row * 2 * d may exceed 32 bits
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < d
    gate_ptr = x_ptr + row * 2 * d
    gate = tl.load(gate_ptr + cols, mask=mask).to(tl.float32)
    up = tl.load(gate_ptr + d + cols, mask=mask)
    # Rounded to the model's dtype before it is multiplied, as torch rounds what it writes out.
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    out = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * d + cols, out.to(up.dtype), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :d]) * x[..., d:] in one pass: [..., 2 * d] -> [..., d], bfloat16, float16 or
    float32.

    With 4 warps a thread has 8 neighbouring numbers of the 1024, in bfloat16 one load of 16 bytes
    (when d is a multiple of 16, so that rows are aligned). A row is cut up rather than looped over,
    so that a single token, too, keeps several multiprocessors busy.
    """
    d = x.shape[-1] // 2
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], d), dtype=x.dtype, device=x.device)
    block_size = min(1024, triton.next_power_of_2(d))
    grid = (out.numel() // d, triton.cdiv(d, block_size))
    silu_and_mul_kernel[grid](x, out, d, BLOCK_SIZE=block_size, num_warps=4)
    return out


# transformers' names. "gelu_new" and "gelu_fast" spell the tanh approximation out; it is the same
# function.
_ACTIVATIONS = {
    "gelu": lambda: nn.GELU(),
    "gelu_new": lambda: nn.GELU(approximate="tanh"),
    "gelu_fast": lambda: nn.GELU(approximate="tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": lambda: nn.ReLU(),
    "sigmoid": lambda: nn.Sigmoid(),
    "silu": lambda: nn.SiLU(),
    "tanh": lambda: nn.Tanh(),
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
