"""What the kernel tests share: devices, tolerances, and a count of the bytes a kernel moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICES = [
    pytest.param("cpu", torch.float32, id="cpu-float32"),
    pytest.param("cuda", torch.float32, id="cuda-float32", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=pytest.mark.gpu),
]
"""Interpreted on the CPU, in float32 alone: the interpreter's bfloat16 products are wrong."""


def randn(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def assert_close(out: torch.Tensor, reference: torch.Tensor) -> None:
    """Relative error against a float64 reference, NaN and inf nowhere."""
    assert reference.dtype == torch.float64
    assert out.isfinite().all()
    error = (out.double() - reference).norm() / reference.norm().clamp_min(1e-30)
    assert error < (1e-5 if out.dtype == torch.float32 else 1e-2), error


@contextmanager
def interpreted_traffic(*of: torch.Tensor) -> Iterator[dict[str, int]]:
    """Bytes that interpreted kernels load and store, masked elements not counted.

    Given tensors, only what lies in their memory counts.
    """
    from triton.runtime import interpreter

    ranges = [(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in of]
    moved = {"loaded": 0, "stored": 0}
    real = interpreter._interpreter

    def count(pointers: Any, mask: Any, itemsize: int) -> int:
        addresses = pointers[mask]
        if not ranges:
            return addresses.size * itemsize
        hits = sum(int(((addresses >= a) & (addresses < b)).sum()) for a, b in ranges)
        return hits * itemsize

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
            moved["loaded"] += count(pointers, mask, np.dtype(dtype).itemsize)
            return real.load(pointers, mask, other, dtype)

        def store(self, pointers: Any, value: Any, mask: Any) -> Any:
            moved["stored"] += count(pointers, mask, value.dtype.itemsize)
            return real.store(pointers, value, mask)

    interpreter._interpreter = Counting()
    try:
        yield moved
    finally:
        interpreter._interpreter = real


class TorchTraffic(TorchDispatchMode):
    """Bytes that torch operations read and write, views not counted."""

    def __init__(self, ignore: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.ignore = ignore
        self.moved = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if not (func.is_view or name == "_unsafe_view" or name in self.ignore):
            for x in (*args, result):
                if isinstance(x, torch.Tensor) and x.dim() > 0:
                    self.moved += x.numel() * x.element_size()
        return result
