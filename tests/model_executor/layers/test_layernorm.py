"""RMSNorm's kernel against float64, alone and with the addition before it."""

from __future__ import annotations

import pytest
import torch

from nanovllm.model_executor.layers.layernorm import RMSNorm, fused_add_rms_norm, rms_norm

pytest.importorskip("triton")

# A token and a batch of real models; widths that fill no block; rows narrower than a program,
# which share one; dimensions before the last.
SHAPES = [
    (1, 1024),
    (7, 576),
    (5, 1000),
    (3, 33),
    (9, 64),
    (33, 16),
    (2, 3, 80),
    (1, 4100),
    (0, 64),
]
# Interpreted, bfloat16 is cut off rather than rounded; float16 stands in for it.
CPU = [("cpu", torch.float32), ("cpu", torch.float16)]
GPU = [("cuda", dtype) for dtype in (torch.float32, torch.bfloat16)]
devices = pytest.mark.parametrize(
    ("device", "dtype"), CPU + [pytest.param(*case, marks=pytest.mark.gpu) for case in GPU]
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def inputs(
    shape: tuple[int, ...], device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, RMSNorm]:
    """x, a residual of another size, and a norm with a weight."""
    generator = torch.Generator().manual_seed(sum(shape))
    x, residual = torch.randn(2, *shape, generator=generator).unbind()
    norm = RMSNorm(shape[-1], eps=1e-5)
    norm.weight.data = 1 + 0.2 * torch.randn(shape[-1], generator=generator)
    return x.to(device, dtype), (3 * residual).to(device, dtype), norm.to(device, dtype)


def reference(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    x = x.double()
    rstd = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + norm.variance_epsilon)
    return x * rstd * norm.weight.double()


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm()) if out.numel() else 0.0


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_normalizes_rows_of_any_number_and_width(
    shape: tuple[int, ...], device: str, dtype: torch.dtype
) -> None:
    x, _, norm = inputs(shape, device, dtype)
    before = x.clone()
    out = rms_norm(x, norm.weight, norm.variance_epsilon)
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert relative_error(out, reference(x, norm)) < TOLERANCE[dtype]
    assert torch.equal(x, before)


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fused_addition_hands_back_the_rounded_sum_and_normalizes_that(
    shape: tuple[int, ...], device: str, dtype: torch.dtype
) -> None:
    """The sum is the one that torch gives, to the last bit; the arguments stay as they are."""
    x, residual, norm = inputs(shape, device, dtype)
    before = x.clone(), residual.clone()
    out, residual_out = fused_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
    assert torch.equal(residual_out, x + residual)
    assert relative_error(out, reference(x + residual, norm)) < TOLERANCE[dtype]
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@devices
def test_the_kernel_rounds_where_the_definition_does(device: str, dtype: torch.dtype) -> None:
    """In a short dtype the same numbers come out, but for the few whose variance, added up in
    another order, falls on the other side of a rounding. Rounding once more or less would change
    a quarter of them."""
    x, residual, norm = inputs((64, 256), device, dtype)
    out, _ = fused_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
    expected, _ = norm.forward_native(x, residual)
    if dtype == torch.float32:
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    else:
        assert (out == expected).float().mean() > 0.99


@devices
def test_a_view_of_some_columns_is_normalized(device: str, dtype: torch.dtype) -> None:
    """Qwen3's q_norm sees the heads of q in qkv, rows that do not follow each other."""
    qkv, _, norm = inputs((5, 6, 32), device, dtype)
    heads = qkv[:, 1:4]
    out = rms_norm(heads, norm.weight, norm.variance_epsilon)
    assert relative_error(out, reference(heads, norm)) < TOLERANCE[dtype]


@pytest.mark.gpu
def test_a_layer_on_the_gpu_runs_the_kernel() -> None:
    x, residual, norm = inputs((4, 128), "cuda", torch.bfloat16)
    fused = fused_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
    for out, expected in zip(norm(x, residual), fused, strict=True):
        assert torch.equal(out, expected)
    assert torch.equal(norm(x), rms_norm(x, norm.weight, norm.variance_epsilon))
