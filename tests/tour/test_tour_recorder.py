"""The recorder: what counts as a pass, and what is seen before and after it. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from nanovllm.tour.recorder import TOOL_ID, Expression, Probe, Recorder
from nanovllm.tour.source import SourceFile


class Lab:
    """One module of source, its probes, and a run."""

    def __init__(self, folder: Path, text: str) -> None:
        text = dedent(text).lstrip("\n")
        self.file = folder / "scripts" / "lab.py"
        self.file.parent.mkdir()
        self.file.write_text(text)
        self.root = folder
        self.source = SourceFile(folder, "scripts/lab.py")
        self.names: dict[str, Any] = {"__name__": "lab"}
        exec(compile(text, str(self.file), "exec"), self.names)

    def probe(self, first: int, last: int, **more: Any) -> Probe:
        return Probe(self.source, first, last, **more)

    def run(self, call: Callable[[], Any], *probes: Probe) -> None:
        recorder = Recorder(probes)
        recorder.find_code(self.root)
        recorder.run(call)


@pytest.fixture
def lab(tmp_path: Path) -> Callable[[str], Lab]:
    return lambda text: Lab(tmp_path.resolve(), text)


def test_a_loop_body_passes_once_an_iteration_and_is_seen_before_and_after(lab):
    it = lab("""
        def f(n):
            total = 0
            for i in range(n):
                total += i
                double = total * 2
            return double
        """)
    body = it.probe(4, 5, show=["total", "double"])
    it.run(lambda: it.names["f"](3), body)
    assert [(p.before, p.after) for p in body.passes] == [
        (["0", None], ["0", "0"]),
        (["0", "0"], ["1", "2"]),
        (["1", "2"], ["3", "6"]),
    ]


def test_a_whole_loop_is_one_pass(lab):
    it = lab("""
        def f(n):
            while n:
                n -= 1
            return n
        """)
    loop = it.probe(2, 3, show=["n"])
    it.run(lambda: it.names["f"](3), loop)
    assert [(p.before, p.after) for p in loop.passes] == [(["3"], ["0"])]


def test_the_body_of_while_true_passes_once_an_iteration_though_its_loop_has_no_line(lab):
    it = lab("""
        def f():
            n = 0
            while True:
                n = max(
                    n + 1,
                    0,
                )
                if n == 3:
                    break
            return n
        """)
    body = it.probe(4, 9, show=["n"])
    it.run(it.names["f"], body)
    assert [p.after for p in body.passes] == [["1"], ["2"], ["3"]]


def test_a_call_over_several_lines_is_one_pass(lab):
    it = lab("""
        def f(a):
            b = dict(
                x=a,
                y=len(
                    "abc"),
            )
            return b
        """)
    call = it.probe(2, 6, show=["b"])
    it.run(lambda: it.names["f"](1), call)
    assert [p.after for p in call.passes] == [["{'x': 1, 'y': 3}"]]


def test_objects_are_summarised_when_they_are_seen(lab):
    it = lab("""
        def f():
            items = []
            items.append(1)
            items.clear()
            items.append(2)
        """)
    probe = it.probe(3, 3, show=["items"])
    it.run(it.names["f"], probe)
    assert (probe.passes[0].before, probe.passes[0].after) == (["[]"], ["[1]"])


def test_a_return_ends_the_pass_and_is_seen(lab):
    it = lab("""
        def f(x):
            y = x + 1
            return y * 2
        """)
    probe = it.probe(1, 3, show=["returned"], expect=["returned == (before(x) + 1) * 2"])
    it.run(lambda: it.names["f"](4), probe)
    assert probe.passes[0].after == ["10"]
    assert probe.passes[0].errors == []


def test_an_exception_ends_the_pass(lab):
    it = lab("""
        def f(x):
            y = x + 1
            raise ValueError(y)
        """)

    def call() -> None:
        with pytest.raises(ValueError, match="5"):
            it.names["f"](4)

    probe = it.probe(2, 3, show=["y"])
    it.run(call, probe)
    assert probe.passes[0].after == ["5"]


def test_an_exception_that_is_caught_inside_does_not_end_the_pass(lab):
    it = lab("""
        def f(x):
            try:
                y = 1 / x
            except ZeroDivisionError:
                y = 0
            return y
        """)
    probe = it.probe(2, 5, show=["y"])
    it.run(lambda: it.names["f"](0), probe)
    assert [p.after for p in probe.passes] == [["0"]]
    assert [
        it.source.lines[s.lineno - 1].strip() for s in probe.statements if not probe.ran(s)
    ] == []


def test_recursion_keeps_each_frame_apart(lab):
    it = lab("""
        def f(n):
            if n == 0:
                return 0
            below = f(n - 1)
            return below + 1
        """)
    probe = it.probe(4, 4, show=["n", "below"])
    it.run(lambda: it.names["f"](2), probe)
    assert [(p.nth, p.after) for p in probe.passes] == [(2, ["1", "0"]), (1, ["2", "1"])]


def test_a_generator_keeps_its_pass_open_over_a_yield(lab):
    it = lab("""
        def f():
            a = 1
            yield a
            a = 2
            yield a
        """)
    probe = it.probe(2, 4, show=["a"])
    it.run(lambda: list(it.names["f"]()), probe)
    assert [p.after for p in probe.passes] == [["2"]]


def test_lines_inside_comprehensions_and_inner_functions_count_as_run(lab):
    it = lab("""
        def f(n):
            squares = [
                i * i
                for i in range(n)
            ]
            def inner():
                return sum(
                    squares)
            unused = lambda: (
                None)
            return inner()
        """)
    probe = it.probe(2, 11)
    it.run(lambda: it.names["f"](3), probe)
    assert {3, 4, 7, 8} <= probe.lines
    assert 10 not in probe.lines


def test_when_is_judged_at_the_end_and_says_what_it_saw(lab):
    it = lab("""
        def f(n):
            for i in range(n):
                name = "abc"[i]
        """)
    chosen = it.probe(3, 3, show=["i"], when='name == "b"')
    third = it.probe(3, 3, show=["i"], when="nth == 3")
    never = it.probe(3, 3, when='name == "z"')
    it.run(lambda: it.names["f"](3), chosen, third, never)
    assert [p.after for p in chosen.passes] == [["1"]]
    assert [p.after for p in third.passes] == [["2"]]
    assert never.passes == []
    assert never.when_notes == ["name is 'a'", "name is 'b'", "name is 'c'"]


def test_decorated_functions_and_methods_are_found(lab):
    it = lab("""
        from functools import wraps

        def plain(function):
            def wrapper(*args):
                return function(*args)
            return wrapper

        class C:
            @property
            @plain
            def p(self):
                return 7

            @staticmethod
            def s():
                return 8
        """)
    prop, static = it.probe(12, 12, show=["returned"]), it.probe(16, 16, show=["returned"])
    it.run(lambda: (it.names["C"]().p, it.names["C"].s()), prop, static)
    assert prop.passes[0].after == ["7"]
    assert static.passes[0].after == ["8"]
    assert prop.passes[0].seq < static.passes[0].seq


def test_a_kernel_is_watched_inside_tritons_interpreter(lab):
    """It runs a rewritten copy, line by line the same. Pointers are shown without addresses."""
    torch, triton = pytest.importorskip("torch"), pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled in this run")
    it = lab("""
        import triton
        import triton.language as tl

        @triton.jit
        def double(x):
            return 2 * x

        @triton.jit
        def kernel(x_ptr, n, BLOCK: tl.constexpr):
            first = tl.program_id(0) * BLOCK
            pointers = x_ptr + first + tl.arange(0, BLOCK)
            x = tl.load(pointers)
            y = double(x)
            tl.store(pointers, y)
        """)
    lines = it.probe(10, 13, show=["n", "BLOCK", "first", "pointers", "x", "y"], expect=["n == 7"])
    inside = it.probe(6, 6, show=["returned"])
    x = torch.arange(4.0)
    it.run(lambda: it.names["kernel"][(2,)](x, 7, BLOCK=2), lines, inside)
    assert x.tolist() == [0, 2, 4, 6]
    shown = ["int32: 7", "2", "int32: 2", "pointer<fp32>[2]"]
    shown += ["fp32[2]: 2.0 3.0", "fp32[2]: 4.0 6.0"]
    assert lines.passes[1].after == shown
    assert lines.passes[1].before == [*shown[:2], None, None, None, None]
    assert not any(p.errors for p in lines.passes)
    assert [p.after for p in inside.passes] == [["fp32[2]: 0.0 2.0"], ["fp32[2]: 4.0 6.0"]]
    assert lines.passes[1].seq < inside.passes[1].seq


def test_a_file_loaded_twice_is_watched_where_it_runs(tmp_path):
    first = Lab(tmp_path.resolve(), "def f():\n    return 1\n")
    again: dict[str, Any] = {}
    exec(compile(first.source.text, str(first.file), "exec"), again)
    for call in (first.names["f"], again["f"]):
        probe = first.probe(2, 2)
        first.run(call, probe)
        assert len(probe.passes) == 1


def test_what_an_expression_calls_is_not_recorded(lab):
    it = lab("""
        def f(x):
            y = g(x)
            return y

        def g(x):
            return x + 1
        """)
    outer, inner = it.probe(2, 2, show=["g(y)"], expect=["g(1) == 2"]), it.probe(6, 6)
    it.run(lambda: it.names["f"](1), outer, inner)
    assert outer.passes[0].after == ["3"]
    assert len(inner.passes) == 1


def test_imports_constants_fields_and_classes_are_static(lab):
    it = lab('''
        import os
        LIMIT = 3
        class C:
            """What it is."""
            field: int = 0
            def m(self):
                """Only
                words."""
                return 1
        ''')
    assert [it.probe(n, n).static for n in (1, 2, 5)] == [True] * 3
    assert it.probe(3, 9).static, "a class"
    assert it.probe(7, 8).static, "a docstring"
    assert not it.probe(6, 9).static


def test_claims_that_fail_say_what_both_sides_are(lab):
    it = lab("""
        def f(a, b):
            c = a + b
            return c
        """)
    probe = it.probe(2, 2, expect=["c == a * b", "c is missing", "c"])
    it.run(lambda: it.names["f"](0, 0), probe)
    assert probe.passes[0].errors == [
        "`c is missing` fails: NameError: name 'missing' is not defined",
        "`c` is false",
    ]
    it.run(lambda: it.names["f"](1, 2), probe)
    assert probe.passes[1].errors[0] == "`c == a * b` is false: c is 3, a * b is 2"


def test_before_is_a_copy_one_level_deep():
    expression = Expression("len(before(items)) + 1 == len(items)")
    items = [1]
    kept = expression.keep({"items": items})
    items.append(2)
    assert expression.value({"items": items, **kept}) is True


def test_nothing_stays_on_after_a_run_even_if_it_fails(lab):
    it = lab("""
        def f():
            raise KeyError
        """)
    probe = it.probe(2, 2)
    before = sys.gettrace()
    with pytest.raises(KeyError):
        it.run(it.names["f"], probe)
    assert sys.gettrace() is before
    if sys.version_info >= (3, 12):
        assert sys.monitoring.get_tool(TOOL_ID) is None
        code = it.names["f"].__code__
        sys.monitoring.use_tool_id(TOOL_ID, "test")
        assert sys.monitoring.get_local_events(TOOL_ID, code) == 0
        assert sys.monitoring.get_events(TOOL_ID) == 0
        sys.monitoring.free_tool_id(TOOL_ID)
    with pytest.raises(KeyError):
        it.names["f"]()
    assert len(probe.passes) == 1


def test_threads_that_begin_while_it_runs_are_seen(lab):
    it = lab("""
        import threading

        def meet(barrier, name):
            barrier.wait()
            done = name
            barrier.wait()

        def f(names):
            barrier = threading.Barrier(len(names))
            threads = [threading.Thread(target=meet, args=(barrier, n)) for n in names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        """)
    done = it.probe(5, 5, show=["name", "threading.current_thread().name != 'MainThread'"])
    it.run(lambda: it.names["f"](["a", "b"]), done)
    assert sorted(p.after for p in done.passes) == [["'a'", "True"], ["'b'", "True"]]
    assert {p.seq for p in done.passes} == {1, 2}


def test_a_thread_that_evaluates_does_not_blind_another(lab):
    it = lab("""
        import threading

        def slow(begun, other_is_past):
            value = 1
            return value

        def quick(begun, other_is_past):
            begun.wait(5)
            value = 2
            other_is_past.set()

        def f():
            events = threading.Event(), threading.Event()
            thread = threading.Thread(target=quick, args=events)
            thread.start()
            slow(*events)
            thread.join()
        """)
    # The expression lets the other thread go on, and waits until it has been through its range.
    slow = it.probe(4, 4, show=["begun.set() or other_is_past.wait(5)"])
    quick = it.probe(9, 9, show=["value"])
    it.run(it.names["f"], slow, quick)
    assert [p.after for p in slow.passes] == [["True"]]
    assert [p.after for p in quick.passes] == [["2"]]
