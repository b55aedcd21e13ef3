"""Small tensors from the host to the device without waiting for either.

A copy from ordinary memory holds the host up, whatever non_blocking says; one from page-locked
memory only joins the stream. The memory is new each time: a buffer that is used again could still
be waiting to be read when the next step overwrites it.

Upstream: async_tensor_h2d in vllm/utils/torch_utils.py (0.23.0)
"""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, which is on the CPU, on `device`. torch keeps the page-locked copy until the device
    has read it. On a CPU it is the tensor itself."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
