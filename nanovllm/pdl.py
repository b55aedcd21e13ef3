"""Programmatic dependent launch: a kernel begins before the one before it has ended.

Between two kernels of a stream the GPU is idle: the second is launched when the last program of the
first has ended. Launched this way it begins as soon as every program of the first has begun and
there is room, fetches what does not depend on the first (weights), and then waits.

    kernel n      launch_dependents   weights ...   wait   inputs ... results
    kernel n + 1           launch_dependents   weights ...          wait   inputs ... results

The rule that keeps it right: until its `gdc_wait` has returned, a kernel reads nothing but weights
and writes nothing. All kernels before may still be running until then, not the last one only; after
it all of them have ended, because each has waited for its own. So no kernel may call
`gdc_launch_dependents` without `gdc_wait`, and one that is launched plainly keeps to the rule by
itself.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
Upstream: `supports_pdl` is in vllm/lora/ops/triton_ops/utils.py (0.23.0).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched so: NVIDIA GPUs from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def pdl_options(device: torch.device, use_pdl: bool | None = None) -> dict[str, Any]:
    """Keyword arguments for the launch of a kernel that has a constexpr USE_PDL.

    Args:
        use_pdl: None: wherever the device supports it. False is for measuring what it brings.
    """
    if supports_pdl(device) if use_pdl is None else use_pdl:
        return {"USE_PDL": True, "launch_pdl": True}
    return {"USE_PDL": False}
