"""Triton where it is installed, and a stand-in where it is not.

A layer's Triton kernel stands in the layer's own file, beside torch code that computes the same.
Such a file must be importable on machines without Triton (macOS, Windows), on which the kernel is
never launched; there `@triton.jit` leaves the function as it is.

Upstream: vllm/triton_utils/ (0.23.0), a package there.
Left out: looking for an active driver; a kernel is launched only on tensors that are on a GPU.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

HAS_TRITON = find_spec("triton") is not None

if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl
else:

    class _NoTriton:
        """Enough of Triton to define kernels, not to launch them."""

        constexpr = None

        @staticmethod
        def jit(function: Any = None, **_: Any) -> Any:
            return function if function is not None else lambda f: f

    triton = tl = _NoTriton()


def use_triton(x: torch.Tensor) -> bool:
    """Whether operations on `x` run as Triton kernels: wherever x is on a CUDA device and Triton is
    installed. The one place that decides."""
    return x.is_cuda and HAS_TRITON


@cache
def num_compute_units(device: torch.device) -> int:
    """Multiprocessors of a GPU: how many programs it takes to keep all of it busy. 1 elsewhere
    (Triton's interpreter).

    Source: num_compute_units in vllm/utils/platform_utils.py.
    """
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


__all__ = ["HAS_TRITON", "num_compute_units", "tl", "triton", "use_triton"]
