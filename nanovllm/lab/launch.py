"""What every wrapper of the lab asks before it launches a kernel.

Upstream: none.
"""

from __future__ import annotations

import torch

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_input(name: str, x: torch.Tensor) -> None:
    """Refuses what the kernels' address arithmetic does not expect.

    Raises:
        ValueError: the dtype is not a float the kernels take, or the last dimension is strided.
    """
    if x.dtype not in KERNEL_DTYPES:
        raise ValueError(f"{name} is {x.dtype}; the kernels take float32, bfloat16 and float16.")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {x.stride(-1)} in its last dimension; a kernel reads neighbouring "
            f"elements with neighbouring threads, so it must be 1: call contiguous()."
        )


def output_like(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """`out` if it is given and fits, else memory of x's shape and dtype, contiguous.

    Raises:
        ValueError: `out` has another shape, dtype or device, or is not contiguous.
    """
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"out is {list(out.shape)} {out.dtype} on {out.device}; it must be {list(x.shape)} "
            f"{x.dtype} on {x.device}."
        )
    if not out.is_contiguous():
        raise ValueError("out must be contiguous.")
    return out
