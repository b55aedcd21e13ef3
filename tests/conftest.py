"""Hypothesis profiles. Choose one with HYPOTHESIS_PROFILE or pytest's --hypothesis-profile.

ci       derandomised and fast: the same examples in every run, so it explores nothing new
nightly  2,000 examples of up to 100 steps, drawn anew each time
mutants  ci's examples, left as they are when one fails (tests/mutants needs no small program)

A failure prints the program that leads to it. Keep it as a plain test beside the spec.
"""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, Phase, settings


def is_gpu_run(arguments: list[str]) -> bool:
    """Whether the command line says -m gpu."""
    expressions = [
        arg[2:] or arguments[i + 1] for i, arg in enumerate(arguments) if arg[:2] == "-m"
    ]
    return any("gpu" in expression and "not gpu" not in expression for expression in expressions)


# Tests not marked `gpu` are about the CPU, also on a machine with a GPU. Set right here, before the
# conftests of subfolders import anything; workers of pytest-xdist have it from their parent.
if "PYTEST_XDIST_WORKER" not in os.environ and not is_gpu_run(sys.argv[1:]):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Triton kernels run too: interpreted, on CPU tensors. Read when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

# Output is as wide as in a pipe, whatever the terminal that the tests are started from.
os.environ.pop("COLUMNS", None)

pytest.register_assert_rewrite("tests.spec.blocks", "tests.spec.support")

settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    max_examples=100,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "mutants",
    parent=settings.get_profile("ci"),
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.register_profile(
    "nightly",
    parent=settings.get_profile("ci"),
    derandomize=False,
    max_examples=2000,
    stateful_step_count=100,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
