"""The pass from qkv to attention's inputs against the separate layers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from nanovllm.model_executor.layers.layernorm import RMSNorm
from nanovllm.model_executor.layers.qk_norm_rope_cache import (
    qk_norm_rope_and_cache,
    qk_norm_rope_and_cache_cuda,
    qk_norm_rope_and_cache_native,
)
from nanovllm.model_executor.layers.rotary_embedding import RotaryEmbedding

pytest.importorskip("triton")

NUM_BLOCKS, BLOCK_SIZE = 7, 16
# Interpreted, bfloat16 is cut off rather than rounded; float16 stands in for it.
CPU = [("cpu", torch.float32), ("cpu", torch.float16)]
GPU = [("cuda", dtype) for dtype in (torch.float32, torch.bfloat16)]
devices = pytest.mark.parametrize(
    ("device", "dtype"), CPU + [pytest.param(*case, marks=pytest.mark.gpu) for case in GPU]
)
# A token alone; a few; more than are spread out over heads. Head counts that fill no program, head
# sizes that fill no block.
SHAPES = [
    # tokens, heads, kv heads, head size
    (1, 16, 8, 128),
    (5, 3, 1, 64),
    (33, 5, 3, 80),
    (3, 4, 2, 96),
    (2, 2, 2, 256),
    (35, 1, 1, 6),
]


@dataclass
class Case:
    qkv: torch.Tensor
    positions: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    layers: dict

    def args(self) -> tuple[torch.Tensor, ...]:
        """Copies, since the operation writes to them."""
        return self.qkv.clone(), self.positions, self.kv_cache.clone(), self.slot_mapping


def make_case(
    shape: tuple[int, int, int, int], with_norm: bool, device: str, dtype: torch.dtype
) -> Case:
    """Random tokens at random positions and slots, every fourth of them padding; a cache full of
    NaN."""
    num_tokens, num_heads, num_kv_heads, head_size = shape
    generator = torch.Generator().manual_seed(sum(shape))
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_size, generator=generator)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_tokens]
    slots[3::4] = -1
    norms = []
    for _ in range(2):
        norm = RMSNorm(head_size, eps=1e-5)
        norm.weight.data = 1 + 0.2 * torch.randn(head_size, generator=generator)
        norms.append(norm.to(device, dtype) if with_norm else None)
    kv_cache = torch.full((NUM_BLOCKS, 2, BLOCK_SIZE, num_kv_heads, head_size), torch.nan)
    return Case(
        qkv.to(device, dtype),
        torch.randint(200, (num_tokens,), generator=generator).to(device),
        kv_cache.to(device, dtype),
        slots.to(device),
        {
            "rotary_emb": RotaryEmbedding(head_size, 200, 10000.0).to(device),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "q_norm": norms[0],
            "k_norm": norms[1],
        },
    )


def agree(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """NaN where NaN is expected; else equal up to what another order of additions may change. In a
    short dtype the compiler may also leave out the rounding between a product and a sum, which
    makes the result more exact."""
    if not torch.equal(out.isnan(), expected.isnan()):
        return False
    out, expected = out.nan_to_num(), expected.nan_to_num()
    if out.dtype == torch.float32:
        return bool((out - expected).norm() <= 1e-6 * expected.norm())
    return bool(
        (out == expected).float().mean() > 0.5
        and (out - expected).float().norm() <= 3e-3 * expected.float().norm()
    )


@devices
@pytest.mark.parametrize("with_norm", [True, False], ids=["qk_norm", "no_norm"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_gives_what_norm_rope_and_cache_write_give(
    shape: tuple[int, int, int, int], with_norm: bool, device: str, dtype: torch.dtype
) -> None:
    """q and k in place, v as it was; keys and values at their slots, and nothing anywhere else."""
    case = make_case(shape, with_norm, device, dtype)
    args, expected = case.args(), case.args()
    qk_norm_rope_and_cache_cuda(*args, **case.layers)
    qk_norm_rope_and_cache_native(*expected, **case.layers)
    assert agree(args[0], expected[0])
    assert agree(args[2], expected[2])


@pytest.mark.parametrize("with_norm", [True, False], ids=["qk_norm", "no_norm"])
def test_the_definition_against_float64(with_norm: bool) -> None:
    """Pair by pair, token by token, slot by slot."""
    num_heads, num_kv_heads, head_size = 3, 2, 8
    case = make_case((6, num_heads, num_kv_heads, head_size), with_norm, "cpu", torch.float32)
    qkv, positions, kv_cache, slot_mapping = case.args()
    qk_norm_rope_and_cache_native(qkv, positions, kv_cache, slot_mapping, **case.layers)
    half = head_size // 2
    for t in range(6):
        heads = case.qkv[t].double().view(-1, head_size)
        for h in range(num_heads + num_kv_heads):
            x = heads[h]
            norm = case.layers["q_norm" if h < num_heads else "k_norm"]
            if norm is not None:
                x = x / (x.pow(2).mean() + 1e-5).sqrt() * norm.weight.double()
            angle = positions[t] * 10000.0 ** (-torch.arange(half).double() / half)
            pairs = torch.complex(x[:half], x[half:]) * torch.polar(
                torch.ones(half).double(), angle
            )
            heads[h] = torch.cat((pairs.real, pairs.imag))
        torch.testing.assert_close(qkv[t].double(), heads.flatten(), rtol=1e-4, atol=1e-4)
        if slot_mapping[t] >= 0:
            block, offset = divmod(int(slot_mapping[t]), BLOCK_SIZE)
            written = kv_cache[block, :, offset].double()
            expected = heads[num_heads:].view(2, num_kv_heads, head_size)
            torch.testing.assert_close(written, expected, rtol=1e-4, atol=1e-4)
    assert int((~kv_cache.isnan()).sum()) == 5 * 2 * num_kv_heads * head_size


@devices
def test_a_cache_whose_blocks_are_apart_is_written_by_its_strides(
    device: str, dtype: torch.dtype
) -> None:
    """The cache of one layer may be a view of a larger tensor."""
    case = make_case((5, 2, 2, 16), True, device, dtype)
    large = case.kv_cache.new_full((NUM_BLOCKS, 3, 2, BLOCK_SIZE, 2, 16), torch.nan)
    qkv, positions, expected, slot_mapping = case.args()
    qk_norm_rope_and_cache_cuda(qkv, positions, large[:, 1], slot_mapping, **case.layers)
    qk_norm_rope_and_cache_native(case.qkv, positions, expected, slot_mapping, **case.layers)
    assert agree(large[:, 1], expected)
    assert large[:, [0, 2]].isnan().all()


@devices
def test_the_results_are_views_of_qkv(device: str, dtype: torch.dtype) -> None:
    case = make_case((2, 4, 2, 8), True, device, dtype)
    qkv, *rest = case.args()
    q, k, v = qk_norm_rope_and_cache(qkv, *rest, **case.layers)
    assert torch.equal(torch.cat((q, k, v), dim=-1), qkv)
    assert q.data_ptr() == qkv.data_ptr()
    assert (q.shape, k.shape, v.shape) == ((2, 32), (2, 16), (2, 16))
    assert not torch.equal(qkv, case.qkv)


@devices
def test_no_tokens_are_no_error(device: str, dtype: torch.dtype) -> None:
    case = make_case((0, 2, 1, 8), False, device, dtype)
    qkv, *rest = case.args()
    qk_norm_rope_and_cache_cuda(qkv, *rest, **case.layers)
    assert rest[1].isnan().all()
