"""What the host writes and the device reads: CpuGpuBuffer; async_tensor_h2d for what comes once.
And freeze_gc_heap, for processes of the engine's own.

The runner fills its inputs with numpy, in place, in arrays that live as long as the engine, and
sends them to the device with one asynchronous copy each. On a CPU there is nothing to send: the
device's twin is the very same memory.

Upstream: vllm/v1/utils.py, async_tensor_h2d in vllm/utils/torch_utils.py, vllm/utils/gc_utils.py
(0.23.0)
Left out: process management, ZMQ addresses and usage reports of the same file.
"""

from __future__ import annotations

import gc

import numpy as np
import torch


class CpuGpuBuffer:
    """A host array with a numpy face and a torch face, and its twin on the device.

        .np    numpy view  ─┐
                            ├─ the same host memory (page-locked if pin_memory)
        .cpu   torch view  ─┘
                              │ copy_to_gpu(n): asynchronous, the first n rows
        .gpu   device tensor ◄┘   (device "cpu": .gpu *is* .cpu, and the copy does nothing)

    Invariant: whatever reads `.gpu` was launched after the copy that it depends on. The host may
    write `.np` again only when that copy is done; in the synchronous engine it is, since every step
    ends by reading the sampled tokens back.
    """

    def __init__(
        self,
        *size: int,
        dtype: torch.dtype,
        device: torch.device,
        pin_memory: bool = False,
    ) -> None:
        """Allocate zeros of shape `size`; `dtype` must be one that numpy has (not bfloat16)."""
        self.cpu = torch.zeros(*size, dtype=dtype, device="cpu", pin_memory=pin_memory)
        self.np: np.ndarray = self.cpu.numpy()
        self.gpu = self.cpu if device.type == "cpu" else torch.zeros_like(self.cpu, device=device)

    def copy_to_gpu(self, n: int | None = None) -> torch.Tensor:
        """Start copying the first `n` rows (None: all) to the device and return those of `.gpu`."""
        if self.gpu is not self.cpu:
            self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)
        return self.gpu[:n]


def async_tensor_h2d(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, which is on the CPU, on `device`, without waiting for either.

    A copy from ordinary memory holds the host up, whatever non_blocking says; one from page-locked
    memory only joins the stream. That memory is new each time, and torch keeps it until the device
    has read it: a buffer that is used again could still be waiting when the next step overwrites
    it. On a CPU it is the tensor itself.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def freeze_gc_heap() -> None:
    """Let garbage collections pass over all that exists now.

    Imported modules and the model are a quarter of a million objects that will not go away; a
    collection of the oldest generation looks through them for a tenth of a second, and every
    request waits. For a process that is an engine or a server; in a user's own it would be taking
    liberties.
    """
    gc.collect()
    gc.freeze()
