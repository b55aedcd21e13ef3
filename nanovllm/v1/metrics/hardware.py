"""Ceilings of hardware: how much memory, how many bytes and how many operations a second.

A roofline needs two numbers of a machine. Datasheets give them for named machines, under conditions
that a kernel rarely meets; `measure_hardware` finds what the machine at hand really reaches.

No counterpart upstream, whose perf.py reports rates without dividing them by a ceiling.
Left out: links between GPUs, caches, sparsity (datasheets double their rates for it; ours are the
dense ones).
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
MEASURED = "measured"
BUDGET = 0.7  # seconds for each figure


@dataclass(frozen=True)
class Hardware:
    """One device."""

    name: str
    memory_bytes: int
    bandwidth: float  # bytes/s between memory and chip
    # dtype of a matrix product's operands -> operations/s, dense, summed in float32 (int8: int32)
    flops: Mapping[str, float]
    source: str

    def rate(self, dtype: str) -> float:
        """Operations/s of a matrix product whose weights are of `dtype`.

        What the device does not compute in (int4 anywhere, fp8 on an A100) is widened to 16 bit as
        it is read, so it saves bytes but no time in the multipliers.
        """
        if dtype in self.flops:
            return self.flops[dtype]
        return self.flops["bfloat16"]

    def ridge(self, dtype: str) -> float:
        """Operations a byte at which both ceilings meet: below it memory is what one waits for."""
        return self.rate(dtype) / self.bandwidth


def _nvidia(bf16: float, float32: float, fp8: float | None, int8: float) -> dict[str, float]:
    """Rates in TFLOP/s; float16's is bfloat16's, as long as sums are in float32."""
    rates = {"bfloat16": bf16, "float16": bf16, "float32": float32, "int8": int8}
    if fp8 is not None:
        rates["fp8"] = fp8
    return {dtype: rate * 1e12 for dtype, rate in rates.items()}


def _apple(tflops: float) -> dict[str, float]:
    return dict.fromkeys(("bfloat16", "float16", "float32"), tflops * 1e12)


_HOPPER = _nvidia(989.4, 66.9, 1978.9, 1978.9)

# NVIDIA: bandwidth and rates from the datasheets, half the rate where they state it with sparsity;
# memory as nvidia-smi reports it. float32 is what torch computes by default, without TF32.
# Apple: memory (the largest configuration) and bandwidth as Apple states them. It publishes
# neither rates nor clocks: cores * 128 lanes * 2 * the clock reported for the chip.
HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("h200", 143771 * MIB, 4.8e12, _HOPPER, "datasheet, H200 SXM"),
        Hardware(
            # Read 4.55 to 4.66 TB/s, bfloat16 products 756 to 792 TFLOP/s; the lower ends. What was
            # not measured (float32, fp8, int8) is the datasheet's.
            "h200-measured",
            143771 * MIB,
            4.55e12,
            _HOPPER | {"bfloat16": 756e12, "float16": 756e12},
            "measured on one H200 SXM",
        ),
        Hardware("h100", 81559 * MIB, 3.35e12, _HOPPER, "datasheet, H100 SXM"),
        Hardware(
            "a100", 81920 * MIB, 2.039e12, _nvidia(312, 19.5, None, 624), "datasheet, A100 80GB SXM"
        ),
        Hardware(
            "rtx4090",
            24564 * MIB,
            1.008e12,
            # The GPU can sum fp8 and float16 in float16, too, twice as fast.
            _nvidia(165.2, 82.6, 330.3, 660.6),
            "NVIDIA Ada architecture whitepaper, GeForce RTX 4090",
        ),
        Hardware(
            "m2-ultra",
            192 * 1024 * MIB,
            800e9,
            _apple(76 * 128 * 2 * 1.398e-3),
            "Apple; rate from 76 cores at 1.398 GHz",
        ),
        Hardware(
            "m4-max",
            128 * 1024 * MIB,
            546e9,
            _apple(40 * 128 * 2 * 1.578e-3),
            "Apple; rate from 40 cores at 1.578 GHz",
        ),
    )
}


def get_hardware(name: str, dtype: str = "bfloat16", device: str = "auto") -> Hardware:
    """The hardware of that name; "measured" measures the machine at hand.

    Raises:
        VLLMValidationError: there is none of that name.
    """
    if name == MEASURED:
        return measure_hardware(device, (dtype,))
    if name not in HARDWARE:
        raise VLLMValidationError(
            f"hardware {name!r} is unknown; choose one of {', '.join(HARDWARE)}, or {MEASURED}.",
            parameter="hardware",
            value=name,
        )
    return HARDWARE[name]


def measure_hardware(device: str = "auto", dtypes: tuple[str, ...] = ("bfloat16",)) -> Hardware:
    """Copy bandwidth and matrix rates of a device, within about a second for each.

    A copy of n bytes counts as 2 n: n read, n written. A matrix product of side n counts as 2 n^3,
    and n is made large enough for the rate to have settled. The best of several runs counts.

    Args:
        device: "cpu", "cuda", "cuda:1"; "auto" takes a GPU if there is one.
        dtypes: float32, bfloat16 or float16; the rate of every other dtype is bfloat16's, so
            bfloat16 is always among them.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    floats = [d for d in ("float32", "bfloat16", "float16") if d in dtypes or d == "bfloat16"]
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        name, memory = properties.name, properties.total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        name = f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return Hardware(
        MEASURED,
        memory,
        _measure_bandwidth(where),
        {dtype: _measure_matmul(where, getattr(torch, dtype)) for dtype in floats},
        f"measured now: {name}",
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _measure_bandwidth(device: torch.device) -> float:
    import torch

    # Far larger than any cache.
    num_bytes = (1024 if device.type == "cuda" else 256) * MIB
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _best_time(lambda: target.copy_(source), device, BUDGET)


def _measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    def multiply(size: int, budget: float) -> float:
        a = torch.randn(size, size, device=device).to(dtype)
        out = torch.empty_like(a)
        return _best_time(lambda: torch.mm(a, a, out=out), device, budget)

    # A CPU may be a thousand times slower in one dtype than in another: grow until it takes long
    # enough to be timed well.
    largest = 8192 if device.type == "cuda" else 4096
    size = 256
    while size < largest and multiply(size, budget=0.0) < 0.02:
        size *= 2
    return 2 * size**3 / multiply(size, budget=BUDGET)


def _best_time(call: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Seconds of the fastest call within `budget` seconds, after one to warm up."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    best, begin = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - begin < budget:
        start = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - start)
    return best
