"""Values as text: short, the same in every run, comparable."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

import pytest

from nanovllm.tour.values import MAX_TEXT, same_text, summarize


class Colour(Enum):
    RED = 1


@dataclass
class Point:
    x: float
    y: object = None


class Named:
    request_id = "r1"


class Plain:
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (True, "True"),
        (1 / 3, "0.333"),
        (2.0, "2.0"),
        (123456.0, "1.23e+05"),
        (float("-inf"), "-inf"),
        ("a", "'a'"),
        (Colour.RED, "Colour.RED"),
        ([1, 2.5], "[1, 2.5]"),
        (tuple(range(20)), "(0, 1, 2, 3, 4, 5, 6, … 13 more)"),
        ({3, 1, 2}, "{1, 2, 3}"),
        (deque([1]), "[1]"),
        ({"a": {"b": 1}}, "{'a': {'b': 1}}"),
        (Point(0.12345, [1]), "Point(x=0.123, y=[1])"),
        (Point(1.0, Point(1.0, Point(1.0))), "Point(x=1.0, y=Point(x=1.0, y=Point(…)))"),
        (Named(), "Named r1"),
        (Plain(), "Plain"),
        (Plain, "Plain"),
    ],
)
def test_summaries(value, text):
    assert summarize(value) == text


def test_long_values_are_cut():
    assert len(summarize(dict.fromkeys(range(8), "x" * 50))) == MAX_TEXT


def test_arrays_give_shape_dtype_and_the_first_numbers():
    np = pytest.importorskip("numpy")
    assert summarize(np.arange(12, dtype=np.int32).reshape(3, 4)) == (
        "int32[3, 4]: 0 1 2 3 4 5 6 7 …"
    )
    assert summarize(np.float32(0.5)) == "float32: 0.5"


def test_tensors_give_their_device_too():
    torch = pytest.importorskip("torch")
    assert summarize(torch.tensor([1.0, 1 / 3])) == "float32[2] cpu: 1.0 0.333"
    assert summarize(torch.tensor(7)) == "int64 cpu: 7"
    assert summarize(torch.zeros(0, 2)) == "float32[0, 2] cpu: "


def test_texts_are_the_same_within_the_tolerance_of_their_floats():
    assert same_text("| `a` | `0.333` |", "| `a` | `0.334` |")
    assert not same_text("| `a` | `0.333` |", "| `a` | `0.34` |")
    assert not same_text("| `a` | `16` |", "| `a` | `17` |")
    assert not same_text("[1, 2]", "[1, 2, 3]")
    assert not same_text("int32: 1", "int64: 1")
