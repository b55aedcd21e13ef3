"""Runs a scenario and notes what happened at chosen ranges of lines.

    a pass:   line before | first line ... last line | line after, or return, or exception
                          ^ before                   ^ after: when, expect, show are evaluated here

Only the functions that hold a range are watched: by `sys.monitoring` LINE events local to their
code objects on Python 3.12 and newer, by `sys.settrace` limited to them on 3.11. Values are
summarised when they are seen, because objects mutate. Threads are seen, too (on 3.11 those that
begin while the scenario runs); each evaluates in its own time, and the others go on meanwhile.
"""

from __future__ import annotations

import ast
import copy
import dis
import gc
import importlib
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from nanovllm.tour.source import SourceFile, first_line, header_lines, last_line
from nanovllm.tour.values import summarize

TOOL_ID = 4  # debuggers hold 0, coverage 1, profilers 2
BEFORE = "before"  # `before(x)` in an expression: x as it was when the pass began
MAX_NOTES = 4

Namespace = dict[str, Any]


class Expression:
    """A Python expression over the variables of a frame; `before(...)` parts are kept from the
    beginning of the pass, `returned` is what the function returned if that ended the pass."""

    def __init__(self, text: str) -> None:
        self.text = text
        tree = ast.parse(text.strip(), mode="eval")
        self._olds: dict[str, CodeType] = {}
        for node in ast.walk(tree):
            for name, child in list(ast.iter_fields(node)):
                if isinstance(child, list):
                    child[:] = [self._replace_before(item) for item in child]
                elif isinstance(child, ast.AST):
                    setattr(node, name, self._replace_before(child))
        self._code = _compile(tree.body)
        body = tree.body
        operands = [body.left, *body.comparators] if isinstance(body, ast.Compare) else []
        self._operands = [
            (ast.unparse(o), _compile(o)) for o in operands if not isinstance(o, ast.Constant)
        ]

    def _replace_before(self, node: Any) -> Any:
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == BEFORE and node.args):
            return node
        name = f"before_{len(self._olds)}"
        self._olds[name] = _compile(node.args[0])
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def keep(self, namespace: Namespace) -> Namespace:
        """The values of its `before(...)` parts, copied one level deep. What has no value yet is
        left out; using it later is a NameError."""
        kept = {}
        for name, code in self._olds.items():
            with suppress(Exception):
                kept[name] = copy.copy(eval(code, namespace))
        return kept

    def value(self, namespace: Namespace) -> Any:
        return eval(self._code, namespace)

    def explain(self, namespace: Namespace) -> str:
        """The sides of a comparison, with their values."""
        notes = []
        for text, code in self._operands:
            with suppress(Exception):
                notes.append(f"{text} is {summarize(eval(code, namespace))}")
        return ", ".join(notes)


def _compile(node: ast.expr) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Expression(node)), "<walkthrough>", "eval")


@dataclass
class Pass:
    """One run through a range."""

    seq: int  # when it began, counted over all ranges
    nth: int  # of this range, from 1
    before: list[str | None]  # one a shown expression; None: it had no value
    after: list[str | None] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # claims that do not hold


class Probe:
    """A range to watch, with what to look at, and then what was seen."""

    def __init__(
        self,
        source: SourceFile,
        first: int,
        last: int,
        show: Sequence[str] = (),
        when: str = "",
        expect: Sequence[str] = (),
    ) -> None:
        """
        Raises:
            SyntaxError: an expression is none.
        """
        self.source, self.first, self.last = source, first, last
        self.show = [Expression(text) for text in show]
        self.when = Expression(when) if when else None
        self.expect = [Expression(text) for text in expect]
        self.function = source.enclosing_function(first)
        if self.function and last_line(self.function) < last:
            self.function = None  # several functions, or a class
        self.statements = (
            source.runnable(self.function, first, last) if self.function is not None else []
        )
        # Seen:
        self.num_passes = 0
        self.passes: list[Pass] = []  # those for which `when` holds
        self.when_notes: list[str] = []  # what `when` saw where it did not hold
        self.lines: set[int] = set()  # that ran in the whole function, nested ones included
        self.found = False  # the function exists as an object
        self.code_lines: set[int] = set()  # that can run

    @property
    def static(self) -> bool:
        """Nothing of it runs in a function: imports, constants, fields, whole classes."""
        return not self.statements

    def is_home(self, code: CodeType) -> bool:
        """Whether frames of this code object make the passes."""
        assert self.function is not None
        # A kernel that Triton's interpreter has rewritten has lost its decorators.
        begins = (first_line(self.function), self.function.lineno)
        return code.co_name == self.function.name and code.co_firstlineno in begins

    def ran(self, statement: ast.stmt) -> bool:
        return any(line in self.lines for line in header_lines(statement))

    def can_run(self, statement: ast.stmt) -> bool:
        return any(line in self.code_lines for line in header_lines(statement))

    def restarts_at(self, line: int, previous: int) -> bool:
        """Whether coming to `line` from `previous`, inside the range, is a new pass: a loop body
        whose loop has no line of its own (`while True`)."""
        first = self.statements[0]
        if isinstance(first, (ast.For, ast.While, ast.AsyncFor)):
            return False
        return line == first_line(first) and previous not in range(
            first_line(first), last_line(first) + 1
        )


@dataclass
class _OpenPass:
    record: Pass
    olds: Namespace
    line: int


class _OwnTime(threading.local):
    busy = False  # evaluating: what this thread runs now is ours


class Recorder:
    """Watches ranges while a function runs.

    Args:
        on_pass: called at the first line of each pass, before it runs: (probe, nth, frame).
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        on_pass: Callable[[Probe, int, FrameType], None] | None = None,
    ) -> None:
        self.probes = [probe for probe in probes if not probe.static]
        self.on_pass = on_pass
        self._seqs = itertools.count(1)
        self._own = _OwnTime()
        self._open: dict[tuple[int, FrameType], _OpenPass] = {}
        # By id: code objects of two loads of one file are equal, but only one of them runs.
        self._codes: dict[int, CodeType] = {}
        self._at_home: dict[int, list[Probe]] = {}
        self._lines: dict[int, set[int]] = {}

    def find_code(self, root: Path, extra: Sequence[CodeType] = ()) -> None:
        """Find the code objects to watch: import their modules, then look through all functions
        (decorators hide them from a look by name).

        Args:
            extra: code that no function object holds, such as a scenario's own.
        """
        for probe in self.probes:
            if not probe.source.path.startswith(("walkthroughs/", "tests/", "scripts/")):
                importlib.import_module(probe.source.module)
        by_file: dict[str, list[CodeType]] = {}
        wanted = {str(root / probe.source.path) for probe in self.probes}
        codes = [f.__code__ for f in gc.get_objects() if type(f) is FunctionType]
        # Triton's interpreter runs a rewritten kernel, made at the first launch or when asked for.
        for kernel in [k for k in gc.get_objects() if type(k).__name__ == "InterpretedFunction"]:
            if kernel.fn.__code__.co_filename in wanted:
                codes.append(kernel.rewrite().__code__)
        for code in {id(code): code for code in [*codes, *extra]}.values():
            if code.co_filename in wanted:
                by_file.setdefault(code.co_filename, []).append(code)
        for probe in self.probes:
            for top in by_file.get(str(root / probe.source.path), []):
                for code in _with_nested(top):
                    if probe.is_home(code):
                        self._watch(probe, code)

    def _watch(self, probe: Probe, code: CodeType) -> None:
        probe.found = True
        homes = self._at_home.setdefault(id(code), [])
        if probe not in homes:
            homes.append(probe)
        for nested in _with_nested(code):
            self._codes[id(nested)] = nested
            self._lines.setdefault(id(nested), set())
            probe.code_lines.update(line for _, _, line in nested.co_lines() if line)

    def run(self, function: Callable[[], Any]) -> None:
        """Run `function` and fill in the probes."""
        try:
            with self._events():
                function()
        finally:
            self._open.clear()
            for code_id, probes in self._at_home.items():
                for nested in _with_nested(self._codes[code_id]):
                    for probe in probes:
                        probe.lines |= self._lines[id(nested)]

    # ---- events ----------------------------------------------------------------------------------

    def _events(self) -> Any:
        return self._monitoring() if sys.version_info >= (3, 12) else self._settrace()

    @contextmanager
    def _monitoring(self) -> Iterator[None]:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        events = monitoring.events
        callbacks = {
            events.LINE: lambda code, line: self._on_line(sys._getframe(1), line),
            events.PY_RETURN: lambda code, offset, value: self._on_end(
                sys._getframe(1), {"returned": value}
            ),
            events.PY_UNWIND: lambda code, offset, error: self._on_end(sys._getframe(1), {}),
        }
        monitoring.use_tool_id(TOOL_ID, "nanovllm tour")
        try:
            for event, callback in callbacks.items():
                monitoring.register_callback(TOOL_ID, event, callback)
            for code in self._codes.values():
                monitoring.set_local_events(TOOL_ID, code, events.LINE | events.PY_RETURN)
            monitoring.set_events(TOOL_ID, events.PY_UNWIND)  # cannot be local
            yield
        finally:
            # free_tool_id leaves events live.
            monitoring.set_events(TOOL_ID, 0)
            for code in self._codes.values():
                monitoring.set_local_events(TOOL_ID, code, 0)
            for event in callbacks:
                monitoring.register_callback(TOOL_ID, event, None)
            monitoring.free_tool_id(TOOL_ID)

    @contextmanager
    def _settrace(self) -> Iterator[None]:
        previous = sys.gettrace(), threading.gettrace()
        threading.settrace(self.trace_call)
        sys.settrace(self.trace_call)
        try:
            yield
        finally:
            sys.settrace(previous[0])
            threading.settrace(previous[1])  # type: ignore[arg-type]  # None is what it was

    def trace_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The trace function of 3.11: declines every frame that is not watched."""
        return self.trace_frame if id(frame.f_code) in self._lines else None

    def trace_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._on_line(frame, frame.f_lineno)
        elif event == "return" and not _yields(frame):
            self._on_end(frame, {"returned": arg})
        # on_pass may have put a debugger here.
        return frame.f_trace or self.trace_frame

    def _on_line(self, frame: FrameType, line: int) -> None:
        if self._own.busy:
            return
        self._lines[id(frame.f_code)].add(line)
        for probe in self._at_home.get(id(frame.f_code), ()):
            key = (id(probe), frame)
            inside = probe.first <= line <= probe.last
            opened = self._open.get(key)
            if opened is not None:
                if inside and not probe.restarts_at(line, opened.line):
                    opened.line = line
                    continue
                self._end(probe, frame, self._open.pop(key), {})
            if inside and line in header_lines(probe.statements[0]):
                self._begin(probe, frame, line)

    def _on_end(self, frame: FrameType, extra: Namespace) -> None:
        if self._own.busy:
            return
        for probe in self._at_home.get(id(frame.f_code), ()):
            opened = self._open.pop((id(probe), frame), None)
            if opened is not None:
                self._end(probe, frame, opened, extra)

    def _begin(self, probe: Probe, frame: FrameType, line: int) -> None:
        probe.num_passes += 1
        with self._own_time():
            namespace = {**frame.f_globals, **frame.f_locals, "nth": probe.num_passes}
            olds: Namespace = {}
            expressions = [*probe.expect, *([probe.when] if probe.when else [])]
            kept = [(e, e.keep(namespace)) for e in expressions]
            olds = {"kept": {id(e): values for e, values in kept}}
            record = Pass(next(self._seqs), probe.num_passes, _show(probe, namespace))
        self._open[id(probe), frame] = _OpenPass(record, olds, line)
        if self.on_pass is not None:
            self.on_pass(probe, probe.num_passes, frame)

    def _end(self, probe: Probe, frame: FrameType, opened: _OpenPass, extra: Namespace) -> None:
        record = opened.record
        kept = opened.olds["kept"]
        with self._own_time():
            namespace = {
                **frame.f_globals, **extra, **frame.f_locals, "nth": record.nth
            }  # fmt: skip
            if probe.when is not None and not self._holds(probe, namespace, kept):
                return
            record.after = _show(probe, namespace)
            for claim in probe.expect:
                scope = {**namespace, **kept[id(claim)]}
                try:
                    if not claim.value(scope):
                        why = claim.explain(scope)
                        record.errors.append(f"`{claim.text}` is false{': ' if why else ''}{why}")
                except Exception as e:
                    record.errors.append(f"`{claim.text}` fails: {type(e).__name__}: {e}")
            probe.passes.append(record)

    @staticmethod
    def _holds(probe: Probe, namespace: Namespace, kept: dict[int, Namespace]) -> bool:
        assert probe.when is not None
        scope = {**namespace, **kept[id(probe.when)]}
        try:
            if probe.when.value(scope):
                return True
            note = probe.when.explain(scope)
        except Exception as e:
            note = f"{type(e).__name__}: {e}"
        if note and note not in probe.when_notes and len(probe.when_notes) < MAX_NOTES:
            probe.when_notes.append(note)
        return False

    @contextmanager
    def _own_time(self) -> Iterator[None]:
        self._own.busy = True
        try:
            yield
        finally:
            self._own.busy = False


def _show(probe: Probe, namespace: Namespace) -> list[str | None]:
    texts: list[str | None] = []
    for expression in probe.show:
        try:
            texts.append(summarize(expression.value(namespace)))
        except Exception:
            texts.append(None)
    return texts


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and those in it: inner functions, lambdas, generator expressions and, on 3.11,
    comprehensions."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _with_nested(const)


def _yields(frame: FrameType) -> bool:
    """Whether a trace function's `return` event is a `yield`."""
    if not frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return False
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["YIELD_VALUE"]
