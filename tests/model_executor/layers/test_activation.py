"""SwiGLU's gate in torch and as a kernel, and the functions that config.json may name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from nanovllm.model_executor.layers.activation import (
    _ACTIVATIONS,
    SiluAndMul,
    get_act_and_mul_fn,
    get_act_fn,
    silu_and_mul,
    silu_and_mul_kernel,
)

pytest.importorskip("triton")

# Rows x d: a decode step and a prompt of real models; rows of one block, of a block and a bit, and
# of less; widths that no vector load fits; no rows at all; more dimensions than two.
SHAPES = [
    (1, 3072),
    (37, 1536),
    (5, 1024),
    (5, 1025),
    (3, 7),
    (9, 1),
    (257, 130),
    (0, 64),
    (2, 3, 40),
]
# Interpreted, bfloat16 is cut off rather than rounded; float16 stands in for it.
CPU = [("cpu", torch.float32), ("cpu", torch.float16)]
GPU = [("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
devices = pytest.mark.parametrize(
    ("device", "dtype"), CPU + [pytest.param(*case, marks=pytest.mark.gpu) for case in GPU]
)


def gate_and_up(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor:
    """[..., 2 * d], with gates wide enough to reach both of silu's ends."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)
    x[..., : shape[-1]] *= 4
    return x.to(device, dtype)


def reference(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_computes_silu_of_gate_times_up(
    shape: tuple[int, ...], device: str, dtype: torch.dtype
):
    """Within the dtype's rounding of a float64 reference, for every row and width."""
    x = gate_and_up(shape, device, dtype)
    out = silu_and_mul(x)
    assert out.shape == shape
    assert out.dtype == dtype
    error = (out.double() - reference(x)).norm()
    assert error <= (1e-5 if dtype == torch.float32 else 1e-2) * reference(x).norm()


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_rounds_where_torch_rounds(
    shape: tuple[int, ...], device: str, dtype: torch.dtype
):
    """silu(gate) is rounded to the model's dtype before it is multiplied: all but a few of the
    results are torch's to the last bit, and those are its neighbours. (Exponentials differ.)"""
    x = gate_and_up(shape, device, dtype)
    out, native = silu_and_mul(x), SiluAndMul().forward_native(x)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        out, native, rtol=16 * eps if dtype == torch.float32 else 2 * eps, atol=0
    )
    if dtype != torch.float32:
        assert (out != native).sum() <= 0.01 * out.numel()


@devices
def test_the_kernel_writes_every_result_and_nothing_else(device: str, dtype: torch.dtype):
    """NaN where the output lies, and a canary of NaN behind it."""
    d, rows, block_size = 70, 3, 64
    x = gate_and_up((rows, d), device, dtype)
    memory = torch.full((rows * d + block_size,), torch.nan, device=device, dtype=dtype)
    silu_and_mul_kernel[(rows, 2)](x, memory, d, BLOCK_SIZE=block_size, num_warps=1)
    assert not memory[: rows * d].isnan().any()
    assert memory[rows * d :].isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's numpy
@devices
def test_the_kernel_at_the_ends(device: str, dtype: torch.dtype):
    """A shut gate gives 0 however large `up` is, an open one passes it; NaN stays NaN."""
    gate = torch.tensor([-1e4, -200.0, 0.0, 1.0, 200.0, torch.nan], device=device, dtype=dtype)
    up = torch.full_like(gate, 3.0)
    out = silu_and_mul(torch.cat((gate, up))[None])[0].float()
    assert out[:3].tolist() == [0, 0, 0]
    assert out[3].item() == pytest.approx(3 * 0.731059, rel=1e-2)
    assert out[4].item() == 600
    assert out[5].isnan()


@devices
def test_the_kernel_reads_rows_that_do_not_lie_side_by_side(device: str, dtype: torch.dtype):
    """A slice of a wider tensor, and a transposed one."""
    wide = gate_and_up((6, 48), device, dtype)
    for x in (wide[:, 10:50], wide[::2], wide.t()):
        torch.testing.assert_close(silu_and_mul(x), silu_and_mul(x.clone().contiguous()))


def test_the_layer_is_torch_on_a_cpu():
    """Its results there are those of silu and a multiplication, to the last bit."""
    for dtype in (torch.float32, torch.bfloat16):
        x = gate_and_up((5, 33), "cpu", dtype)
        gate, up = x.chunk(2, dim=-1)
        assert torch.equal(get_act_and_mul_fn("silu")(x), F.silu(gate) * up)


@pytest.mark.gpu
def test_the_layer_is_the_kernel_on_a_gpu():
    """Same bits, and no others for a row among many: results do not depend on the batch."""
    x = gate_and_up((64, 3072), "cuda", torch.bfloat16)
    out = get_act_and_mul_fn("silu")(x)
    assert torch.equal(out, silu_and_mul(x))
    assert torch.equal(out[17:18], silu_and_mul(x[17:18]))


@pytest.mark.gpu
def test_the_kernel_counts_in_64_bits():
    """The last of so many rows that its offset does not fit into 32 bits."""
    rows, d = 2**31 // 8192 + 1, 4096
    x = torch.empty(rows, 2 * d, device="cuda", dtype=torch.bfloat16)
    x[-1] = 1
    assert silu_and_mul(x)[-1].float().unique().tolist() == pytest.approx([0.73046875])


@pytest.mark.parametrize("name", _ACTIVATIONS)
def test_a_named_function_is_the_one_that_transformers_means(name: str):
    """In float32, to rounding: transformers spells some of them out."""
    x = torch.linspace(-12, 12, 4801)
    torch.testing.assert_close(get_act_fn(name)(x), ACT2FN[name](x), atol=1e-6, rtol=1e-5)
