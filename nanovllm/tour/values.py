"""Values as text: summarised when they are seen, because objects mutate.

A summary is short, the same in every run and on every Python version (no addresses, sets in order),
and its numbers can be compared with a tolerance.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import Any

MAX_ITEMS = 8
MAX_TEXT = 160
# An object with one of these is called by it.
NAMES = ("request_id", "req_id", "block_id", "name")
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
REL_TOL, ABS_TOL = 0.01, 0.001  # summaries have three digits


def summarize(value: Any, depth: int = 0) -> str:
    """One line about a value; floats have three digits, tensors shape, dtype, device and the first
    numbers."""
    text = _summarize(value, depth)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _summarize(value: Any, depth: int) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= 60 else repr(value[:57]) + "…"
    if type(value).__module__ == "triton.language.core" and hasattr(value, "handle"):
        return _kernel_tensor(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _tensor(value)
    if isinstance(value, Mapping):
        pairs = (
            f"{summarize(k, depth + 1)}: {summarize(v, depth + 1)}"
            for k, v in _head(list(value.items()))
        )
        return "{" + ", ".join(pairs) + _more(value) + "}"
    if isinstance(value, Set):
        items = sorted(summarize(item, depth + 1) for item in value)
        return "{" + ", ".join(_head(items)) + _more(value) + "}"
    if isinstance(value, Sequence) or type(value).__name__ == "deque":
        inside = ", ".join(summarize(item, depth + 1) for item in _head(list(value)))
        left, right = ("(", ")") if isinstance(value, tuple) else ("[", "]")
        return left + inside + _more(value) + right
    return _object(value, depth)


def _float(value: float) -> str:
    text = f"{value:.3g}"
    return text if re.search(r"[.en]", text) else f"{text}.0"


def _head(items: list[Any]) -> list[Any]:
    return items if len(items) <= MAX_ITEMS else items[: MAX_ITEMS - 1]


def _more(items: Any) -> str:
    hidden = len(items) - len(_head(list(items)))
    return f", … {hidden} more" if hidden else ""


def _tensor(value: Any) -> str:
    """`int64[5] cpu: 0 1 2 3 4`; numpy arrays and scalars without a device."""
    dtype = str(value.dtype).removeprefix("torch.")
    shape = f"[{', '.join(map(str, value.shape))}]" if len(value.shape) else ""
    device = getattr(value, "device", None)
    device = f" {device}" if device is not None and "torch" in type(value).__module__ else ""
    flat = value.reshape(-1)
    numbers = [_summarize(n, 9) for n in flat[:MAX_ITEMS].tolist()]
    more = " …" if math.prod(value.shape) > MAX_ITEMS else ""
    return f"{dtype}{shape}{device}: {' '.join(numbers)}{more}"


def _kernel_tensor(value: Any) -> str:
    """In a kernel that Triton interprets: `fp32[4]: 0.0 1.0 2.0 3.0`. Not the numbers of pointers,
    which are addresses, nor of bf16, which it keeps as integers."""
    array = value.handle.data if value.type.is_block() else value.handle.data.reshape(())
    dtype = str(value.type.scalar)
    if value.type.scalar.is_ptr() or dtype == "bf16":
        return f"{dtype}[{', '.join(map(str, array.shape))}]" if array.shape else dtype
    return dtype + _tensor(array).removeprefix(str(array.dtype))


def _object(value: Any, depth: int) -> str:
    name = type(value).__name__
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return str(value.__name__)
    for attribute in NAMES:
        if isinstance(known := getattr(value, attribute, None), (int, str)):
            return f"{name} {known}"
    if dataclasses.is_dataclass(value):
        if depth > 1:
            return f"{name}(…)"
        fields = dataclasses.fields(value)
        inside = [f"{f.name}={summarize(getattr(value, f.name), depth + 1)}" for f in fields[:6]]
        return f"{name}({', '.join(inside)}{', …' if len(fields) > 6 else ''})"
    return name


def same_text(old: str, new: str) -> bool:
    """Whether two texts say the same, floats compared with a tolerance."""
    if old == new:
        return True
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return False
    return all(map(_same_number, NUMBER.findall(old), NUMBER.findall(new)))


def _same_number(old: str, new: str) -> bool:
    if not re.search(r"[.e]", old + new):
        return old == new
    return math.isclose(float(old), float(new), rel_tol=REL_TOL, abs_tol=ABS_TOL)
