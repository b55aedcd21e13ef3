"""Linear layers of a few rows, with what they fuse, against the separate operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanovllm.model_executor.layers.layernorm import RMSNorm
from nanovllm.model_executor.layers.linear import LinearBase
from nanovllm.model_executor.layers.skinny_linear import (
    MAX_DOT_TILE_BYTES,
    SKINNY_MAX_ROWS,
    SkinnyConfig,
    get_skinny_config,
    skinny_linear_cuda,
    skinny_linear_native,
    use_skinny_linear,
)

pytest.importorskip("triton")

GPU = [("cuda", dtype) for dtype in (torch.float32, torch.bfloat16)]
gpu = [pytest.param(*case, marks=pytest.mark.gpu) for case in GPU]
devices = pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), *gpu])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Rows, outputs, inputs: a whole number of programs and of chunks, and not; odd rows and inputs.
SHAPES = [(1, 32, 256), (3, 34, 600), (5, 18, 1030)]
# Both kernels, a chunk that is more than the input and several chunks of it.
CONFIGS = [
    SkinnyConfig(8, 256, 4, use_dot=False),
    SkinnyConfig(4, 2048, 8, use_dot=False),
    SkinnyConfig(16, 256, 4, use_dot=True),
    SkinnyConfig(32, 1024, 8, use_dot=True),
]
FUSED = ["bias", "residual", "norm_silu_and_mul", "norm_residual_bias"]


def make_case(
    shape: tuple[int, int, int], fused: str, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    """x, weight, bias and the keyword arguments."""
    num_rows, n, k = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    x, weight, bias = randn(num_rows, k), randn(n, k) / k**0.5, None
    kwargs: dict[str, Any] = {"silu_and_mul": "silu" in fused}
    if "bias" in fused:
        bias = randn(n)
    if "norm" in fused:
        x = 5 * x
        kwargs["norm"] = RMSNorm(k, eps=1e-5)
        kwargs["norm"].weight.data = 1 + 0.2 * randn(k)
    if "residual" in fused:
        kwargs["residual"] = randn(num_rows, n)
    return x, weight, bias, kwargs


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RMSNorm | None = None,
    silu_and_mul: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float64."""
    x = x.double()
    if norm is not None:
        x = x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    y = x @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if silu_and_mul:
        gate, up = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * up
    return y if residual is None else y + residual.double()


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@devices
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_kernels_compute_the_layer_with_what_is_fused(
    config: SkinnyConfig, fused: str, device: str, dtype: torch.dtype
) -> None:
    """Close to float64, for every shape."""
    if config.use_dot and (device, dtype) == ("cuda", torch.float32):
        pytest.skip("tensor cores have no float32, and the kernel no room for it")
    for shape in SHAPES:
        x, weight, bias, kwargs = make_case(shape, fused, device, dtype)
        out = skinny_linear_cuda(x, weight, bias, **kwargs, config=config)
        expected = reference(x, weight, bias, **kwargs)
        assert out.shape == expected.shape
        assert out.dtype == dtype
        assert relative_error(out, expected) < TOLERANCE[dtype], shape


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize(
    ("use_dot", "device", "dtype"),
    [
        # Interpreted, bfloat16 is cut off rather than rounded, and tensor cores add in float16.
        (False, "cpu", torch.float16),
        pytest.param(False, "cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(True, "cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_the_kernels_round_where_the_separate_operations_do(
    use_dot: bool, device: str, dtype: torch.dtype, fused: str
) -> None:
    """In a short dtype nearly all results are those of the definition, to the last bit; rounding
    once less would change more than a tenth of them."""
    x, weight, bias, kwargs = make_case((3, 512, 64), fused, device, dtype)
    config = SkinnyConfig(16, 256, 4, use_dot=use_dot)
    out = skinny_linear_cuda(x, weight, bias, **kwargs, config=config)
    expected = skinny_linear_native(x, weight, bias, **kwargs)
    assert (out == expected).float().mean() > 0.95


@devices
def test_rows_of_a_wider_tensor_and_more_dimensions(device: str, dtype: torch.dtype) -> None:
    """q is a view of qkv; its rows are apart."""
    x, weight, _, _ = make_case((4, 24, 96), "", device, dtype)
    config = SkinnyConfig(8, 256, 4, use_dot=False)
    wide = torch.full((4, 200), torch.nan, device=device, dtype=dtype)
    wide[:, 50:146] = x
    out = skinny_linear_cuda(wide[:, 50:146], weight, config=config)
    assert relative_error(out, reference(x, weight, None)) < TOLERANCE[dtype]
    assert torch.equal(skinny_linear_cuda(x.view(2, 2, 96), weight, config=config).view(4, 24), out)


@pytest.mark.parametrize("num_rows", [1, 2, 8])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 1024), (1024, 3072), (151936, 1024), (576, 1536), (28672, 4096), (6, 16)]
)
def test_the_configuration_fits_the_device(
    num_rows: int, element_size: int, n: int, k: int
) -> None:
    """Tiles that Triton can make, that fit in registers and shared memory, for all processors."""
    config = get_skinny_config(num_rows, n, k, element_size, num_sms=132)
    tile = config.block_n * k * element_size
    for size in config:
        assert int(size) & (int(size) - 1) == 0
    assert tile <= (MAX_DOT_TILE_BYTES if config.use_dot else 65536)
    fewest_rows = 16 if config.use_dot else 2
    assert config.block_n == fewest_rows or n >= config.block_n * 132 // 2


def test_the_kernel_is_for_the_gpu() -> None:
    """On the CPU, and for float64 anywhere, a layer is torch's."""
    assert not use_skinny_linear(torch.zeros(1, 64))


def test_a_fused_layer_is_the_layer_between_its_neighbours() -> None:
    """`forward_fused` without anything is `forward`; with norm and residual it is their chain."""
    layer = LinearBase(48, 32, bias=True)
    norm = RMSNorm(48)
    generator = torch.Generator().manual_seed(0)
    for param in layer.parameters():
        param.data = torch.randn(param.shape, generator=generator)
    x, residual = torch.randn(3, 48, generator=generator), torch.randn(3, 32, generator=generator)
    assert torch.equal(layer.forward_fused(x), layer(x))
    assert torch.equal(
        layer.forward_fused(x, norm=norm, residual=residual), residual + layer(norm(x))
    )
    gate, up = layer(x).chunk(2, dim=-1)
    assert torch.equal(layer.forward_fused(x, silu_and_mul=True), F.silu(gate) * up)


@pytest.mark.gpu
def test_a_layer_on_the_gpu_takes_the_kernel_for_a_few_rows() -> None:
    """And cuBLAS for more, or where a row is too wide; with the same results."""
    layer = LinearBase(256, 128).to("cuda", torch.bfloat16)
    layer.weight.data = torch.randn(128, 256, device="cuda").bfloat16() / 16
    for num_rows in range(1, SKINNY_MAX_ROWS + 2):
        x = torch.randn(num_rows, 256, device="cuda").bfloat16()
        assert use_skinny_linear(x) == (num_rows <= SKINNY_MAX_ROWS)
        assert relative_error(layer(x), reference(x, layer.weight, None)) < 1e-2
        if use_skinny_linear(x):
            assert torch.equal(layer(x), skinny_linear_cuda(x, layer.weight))
    assert not use_skinny_linear(torch.zeros(2, 65536, device="cuda").bfloat16())
    assert not use_skinny_linear(torch.zeros(1, 64, device="cuda").double())


@pytest.mark.gpu
def test_kernels_that_begin_early_wait_for_those_before() -> None:
    """A chain of dependent layers in a CUDA graph, replayed many times with programmatic dependent
    launch, gives what it gives without, bit for bit. Every layer reads what the one before wrote,
    and adds to a stream that all of them read."""
    generator = torch.Generator("cuda").manual_seed(0)
    depth, width = 12, 1024
    weights = torch.randn(depth, 2, width, width, device="cuda", generator=generator) / width**0.5
    weights = weights.bfloat16()
    norm = RMSNorm(width).to("cuda", torch.bfloat16)

    def chain(x: torch.Tensor, use_pdl: bool) -> torch.Tensor:
        for first, second in weights:
            y = skinny_linear_cuda(x, first, norm=norm, use_pdl=use_pdl)
            x = skinny_linear_cuda(y, second, residual=x, use_pdl=use_pdl)
        return x

    for num_rows in (1, 5):
        x = torch.randn(num_rows, width, device="cuda", generator=generator).bfloat16()
        expected = chain(x, use_pdl=False)
        use_pdl = torch.cuda.get_device_capability()[0] >= 9
        chain(x, use_pdl)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x, use_pdl)
        for _ in range(50):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected)
