"""Fused and online softmax: kernels against float64, and the algebra of the running state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.lab import online_softmax as online
from nanovllm.lab.online_softmax import OnlineSoftmaxConfig, merge, online_softmax
from nanovllm.lab.online_softmax import online_softmax_reference as online_reference
from nanovllm.lab.softmax import MAX_COLS, SoftmaxConfig, choose_config, softmax
from nanovllm.lab.softmax import softmax_reference as reference
from tests.lab.support import DEVICES, assert_close, randn

ONLINE_CONFIGS = [
    pytest.param(OnlineSoftmaxConfig(64, 1, 4, 1), id="one-program-a-row"),
    pytest.param(OnlineSoftmaxConfig(64, 3, 4, 2), id="three-programs-a-row"),
    pytest.param(OnlineSoftmaxConfig(64, 100, 4, 1), id="more-splits-than-tiles"),
    pytest.param(None, id="chosen"),
]


def poison(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 128), (2, 3, 257), (17, 1000), (2, 4097)])
@pytest.mark.parametrize("config", [None, SoftmaxConfig(2, 4)])
def test_fused(
    shape: tuple[int, ...], config: SoftmaxConfig | None, device: str, dtype: torch.dtype
) -> None:
    """Every row length and every number of rows, those that fill no tile among them."""
    x = randn(*shape, device=device, dtype=dtype) * 10
    out = poison(x)
    assert softmax(x, out, config) is out
    assert_close(out, torch.softmax(x.double(), -1))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 64), (2, 3, 257), (2, 1000)])
@pytest.mark.parametrize("config", ONLINE_CONFIGS)
def test_online(
    shape: tuple[int, ...], config: OnlineSoftmaxConfig | None, device: str, dtype: torch.dtype
) -> None:
    """However a row is cut into tiles and the tiles are dealt out to programs."""
    x = randn(*shape, device=device, dtype=dtype) * 10
    out = poison(x)
    assert online_softmax(x, out, config) is out
    assert_close(out, torch.softmax(x.double(), -1))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("splits", [0, 1, 3], ids=["fused", "online", "split"])
def test_nothing_beside_the_output_is_written(splits: int, device: str, dtype: torch.dtype) -> None:
    """Tiles hang over the end of rows and of the matrix; their surplus stays in the program."""
    x = randn(5, 50, device=device, dtype=dtype)
    memory = torch.full((40, 50), 7.0, device=device, dtype=dtype)
    if splits:
        online_softmax(x, memory[10:15], OnlineSoftmaxConfig(64, splits, 4, 1))
    else:
        softmax(x, memory[10:15], SoftmaxConfig(16, 4))
    assert_close(memory[10:15], torch.softmax(x.double(), -1))
    assert (memory[:10] == 7).all() and (memory[15:] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 131072), (1100, 100_003), (2, 2**20 + 5)])
def test_online_on_rows_longer_than_the_chip(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Few rows, which are split, and enough rows that each is one program's."""
    x = randn(*shape, device="cuda", dtype=dtype) * 4
    out = poison(x)
    online_softmax(x, out)
    some = slice(None, None, 97)
    assert out.isfinite().all()
    assert_close(out[some], torch.softmax(x[some].double(), -1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_than_two_to_the_31_elements(dtype: torch.dtype) -> None:
    """Offsets need 64 bits."""
    x = torch.zeros(65537, 32768, device="cuda", dtype=dtype)
    last = randn(32768, device="cuda", dtype=dtype)
    x[-1] = last
    for function in (softmax, online_softmax):
        assert_close(function(x)[-1], torch.softmax(last.double(), -1))


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(
    "function",
    [
        softmax,
        lambda x: online_softmax(x, config=OnlineSoftmaxConfig(16, 1, 4, 1)),
        lambda x: online_softmax(x, config=OnlineSoftmaxConfig(16, 3, 4, 1)),
        lambda x: online_reference(x.float(), 16).to(x.dtype),
        lambda x: reference(x.float()).to(x.dtype),
    ],
    ids=["fused", "online", "split", "online-reference", "reference"],
)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")  # the interpreter's
def test_minus_infinity_gets_nothing(function, device: str, dtype: torch.dtype) -> None:
    """Also where it fills whole tiles or splits, at either end. A row of it alone is NaN, as in
    torch. What is large does not overflow, what is very negative counts if it is all there is."""
    x = randn(6, 50, device=device, dtype=dtype)
    x[0, :40] = -torch.inf
    x[1, 10:] = -torch.inf
    x[2, 1::2] = -torch.inf
    x[3] = -torch.inf
    x[4] = x[4] * 1e4 + 3e4
    x[5] -= 3e37
    out = function(x)
    assert out[3].isnan().all()
    rest = [0, 1, 2, 4, 5]
    assert (out[rest][x[rest] == -torch.inf] == 0).all()
    assert_close(out[rest], torch.softmax(x[rest].double(), -1))


@pytest.mark.parametrize("function", [softmax, online_softmax])
def test_what_does_not_fit_is_refused(function) -> None:
    """In a sentence, before anything is launched."""
    x = torch.zeros(8, 16)
    with pytest.raises(ValueError, match="contiguous"):
        function(x.t())
    with pytest.raises(ValueError, match="contiguous"):
        function(x[:, :8])
    with pytest.raises(ValueError, match="float64"):
        function(x.double())
    with pytest.raises(ValueError, match="out is"):
        function(x, torch.zeros(8, 15))
    assert function(x[:0]).shape == (0, 16)


def test_rows_too_long_for_the_chip_are_sent_on() -> None:
    """The error names the function that takes them."""
    with pytest.raises(ValueError, match="online_softmax"):
        softmax(torch.zeros(1, MAX_COLS + 1))


def test_chosen_configurations() -> None:
    """Short rows share a program; a few long rows share the whole GPU; many do not."""
    assert choose_config(256).block_rows > 1 == choose_config(MAX_COLS).block_rows
    few, many = (online.choose_config(rows, 2**20, 4, sms=132) for rows in (4, 4096))
    assert many.num_splits == 1
    assert 4 * few.num_splits >= 132


finite = st.floats(-50, 50, width=32)
rows = st.lists(finite, min_size=1, max_size=12)


def state(values: list[float]) -> online.State:
    x = torch.tensor(values, dtype=torch.float64)
    return x.max(), torch.exp(x - x.max()).sum()


def assert_same_state(a: online.State, b: online.State) -> None:
    torch.testing.assert_close(a[0], b[0])
    torch.testing.assert_close(a[1], b[1], rtol=1e-12, atol=0)


@given(rows, rows, rows)
def test_merging_is_associative_and_commutative(
    a: list[float], b: list[float], c: list[float]
) -> None:
    """And gives the state of all values at once, so the work can be cut anywhere."""
    left = merge(merge(state(a), state(b)), state(c))
    assert_same_state(left, merge(state(a), merge(state(b), state(c))))
    assert_same_state(left, merge(state(c), merge(state(b), state(a))))
    assert_same_state(left, state(a + b + c))


@given(rows)
def test_the_empty_state_changes_nothing(a: list[float]) -> None:
    """The lowest number with sum 0 is the neutral element."""
    zero = torch.tensor(0.0, dtype=torch.float64)
    empty = (torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64), zero)
    assert_same_state(merge(empty, state(a)), state(a))


@given(rows, st.floats(-1e3, 1e3), st.integers(1, 5))
def test_softmax_sums_to_one_and_ignores_a_shift(
    values: list[float], shift: float, block: int
) -> None:
    """Both references; in the online one, however long its tiles are."""
    x = torch.tensor([values], dtype=torch.float64)
    expected = torch.softmax(x, -1)
    for out in (reference(x + shift), online_reference(x + shift, block)):
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(out.sum(), torch.tensor(1.0, dtype=torch.float64))


@settings(max_examples=15)
@given(rows, st.floats(-1e3, 1e3, width=32), st.integers(1, 3))
def test_the_kernels_ignore_a_shift_too(values: list[float], shift: float, splits: int) -> None:
    """Up to what float32 loses when the shift is added."""
    x = torch.tensor([values], dtype=torch.float32) + shift
    expected = torch.softmax(x.double(), -1)
    assert_close(softmax(x), expected)
    assert_close(online_softmax(x, config=OnlineSoftmaxConfig(4, splits, 1, 1)), expected)
