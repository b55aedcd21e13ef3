"""A walkthrough tied to the code: ranges found, scenario run, values put into tables."""

from __future__ import annotations

import builtins
import contextlib
import difflib
import io
import json
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from nanovllm.exceptions import VLLMValidationError
from nanovllm.tour.anchors import AnchorError, Project, Range
from nanovllm.tour.document import Directive, Document, DocumentError, code, table_of
from nanovllm.tour.recorder import Expression, Pass, Probe, Recorder
from nanovllm.tour.source import first_line
from nanovllm.tour.values import same_text, summarize

ABSENT = "–"


@dataclass(frozen=True)
class Problem:
    """Something to mend. `fixable`: `nanovllm walkthrough fix` mends it."""

    path: str
    line: int
    message: str
    fixable: bool = False

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def find_names(project: Project) -> list[str]:
    """Names of all walkthroughs, in reading order."""
    return sorted(path.stem for path in project.walkthroughs.glob("[0-9]*-*.md"))


def find_name(project: Project, given: str) -> str:
    """The walkthrough called `given`: all of its name, its number or what follows that.

    Raises:
        VLLMValidationError: there is none, or there are several.
    """
    names = find_names(project)
    given = Path(given).name.removesuffix(".md")
    found = [n for n in names if given in (n, n.partition("-")[0], n.partition("-")[2])]
    if len(found) == 1:
        return found[0]
    near = found or difflib.get_close_matches(given, names, n=3, cutoff=0.3) or names
    raise VLLMValidationError(
        f"no walkthrough is called {given!r}; there are: {', '.join(near) or 'none yet'}.",
        parameter="name",
        value=given,
    )


class Walkthrough:
    """One walkthrough and all that is known about it.

    `problems` grows as its parts are looked at; what depends on a broken part is left out.
    """

    def __init__(self, project: Project, name: str) -> None:
        self.project, self.name = project, name
        self.file = project.walkthroughs / f"{name}.md"
        self.path = self.file.relative_to(project.root).as_posix()
        self.problems: list[Problem] = []
        self.ranges: dict[str, Range] = {}
        self.probes: dict[str, Probe] = {}
        self.seen: dict[str, list[Pass]] = {}  # a stop's passes, chosen in the stated order
        self.seconds = 0.0
        text = self.file.read_text(encoding="utf-8")
        try:
            self.document = Document(name, text)
        except DocumentError as e:
            self.problem(e.line, str(e))
            self.document = Document(name, "")
            return
        for line, message in self.document.problems():
            self.problem(line, message)
        self._resolve()

    def problem(self, line: int, message: str, fixable: bool = False) -> None:
        self.problems.append(Problem(self.path, line, message, fixable))

    def line_of(self, label: str) -> int:
        """Where a label is given, or first used."""
        if label in self.document.directives:
            return self.document.directives[label].line
        return next((n.line for n in self.document.links if n.href == f"anchor:{label}"), 1)

    def _resolve(self) -> None:
        document = self.document
        for label in document.labels:
            directive = document.directives.get(label)
            try:
                self.ranges[label] = self.project.resolve(
                    document.anchor_of(label), directive is not None and directive.is_stop
                )
            except (AnchorError, SyntaxError) as e:
                self.problem(self.line_of(label), f"[{label}]: {e}")
        for stop in document.stops:
            if stop.label in self.ranges:
                self._make_probe(stop, self.ranges[stop.label])

    def _make_probe(self, stop: Directive, place: Range) -> None:
        if not place.first:
            self.problem(stop.line, f"[{stop.label}]: a stop needs lines, not a whole file")
            return
        source = self.project.file(place.path)
        try:
            self.probes[stop.label] = Probe(
                source, place.first, place.last, stop.show, stop.when, stop.expect
            )
        except SyntaxError as e:
            text = (e.text or "").strip()
            self.problem(stop.line, f"[{stop.label}]: `{text}` is not a Python expression: {e.msg}")

    @property
    def resolved(self) -> bool:
        """Every anchor was found."""
        labels = self.document.labels
        return bool(self.document.text) and all(label in self.ranges for label in labels)

    # ---- the run ---------------------------------------------------------------------------------

    @property
    def scenario_file(self) -> Path:
        return self.project.walkthroughs / "scenarios" / f"{self.document.scenario}.py"

    def load_scenario(self) -> Callable[[], Any]:
        """Run the scenario's module level (its set-up) and return its `main`.

        Raises:
            VLLMValidationError: there is no such scenario, or it has no `main`.
        """
        path = self.scenario_file
        if not path.is_file():
            raise VLLMValidationError(
                f"scenario {self.document.scenario!r} has no file {path.name} in {path.parent}."
            )
        # A real module: dataclasses look theirs up by name.
        module = types.ModuleType(f"scenario_{path.stem}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
        exec(code, vars(module))
        main: Any = getattr(module, "main", None)
        if main is None:
            raise VLLMValidationError(f"scenario {path.name} has no main().")
        return main

    @contextlib.contextmanager
    def _paths(self) -> Iterator[None]:
        added = [str(self.project.root), str(self.scenario_file.parent)]
        sys.path[:0] = added
        try:
            yield
        finally:
            for entry in added:
                sys.path.remove(entry)

    def run(
        self,
        on_pass: Callable[[Probe, int, FrameType], None] | None = None,
        on_start: Callable[[Recorder], None] | None = None,
    ) -> None:
        """Set the scenario up and run it, watched. Nothing is caught."""
        with self._paths():
            main = self.load_scenario()
            recorder = Recorder(list(self.probes.values()), on_pass)
            recorder.find_code(self.project.root)
            if on_start is not None:
                on_start(recorder)
            begun = time.perf_counter()
            recorder.run(main)
            self.seconds = time.perf_counter() - begun

    def record(self) -> None:
        """Run the scenario and see what the stops say about it."""
        if not self.document.scenario:
            if running := [label for label, probe in self.probes.items() if not probe.static]:
                self.problem(
                    self.line_of(running[0]),
                    f"[{running[0]}] is code that runs, but no `<!-- scenario: NAME -->` is named",
                )
                return
        else:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    self.run()
            except Exception as e:
                where = traceback.extract_tb(e.__traceback__)[-1]
                self.problem(
                    1,
                    f"scenario {self.document.scenario!r} fails: {type(e).__name__}: {e} "
                    f"({Path(where.filename).name}:{where.lineno})",
                )
                return
        self._choose_passes()

    def _choose_passes(self) -> None:
        """Walk forward in time: a stop's pass is the first fitting one that begins no earlier than
        the stop before it did."""
        now, previous = 0, ""
        for stop in self.document.stops:
            probe = self.probes.get(stop.label)
            if probe is None:
                continue
            if probe.static:
                self._look_at_static(stop, probe)
                continue
            message = self._why_missed(stop, probe)
            passes = [p for p in probe.passes if stop.any_order or p.seq >= now]
            if not message and not passes:
                message = f"runs before [{previous}] only, which the text has come to already"
            if message:
                self.problem(stop.line, f"[{stop.label}] {message}")
                continue
            self.seen[stop.label] = passes[: max(stop.rows, 1)]
            if len(passes) < stop.rows:
                self.problem(stop.line, f"[{stop.label}] rows: {stop.rows}, but {len(passes)} ran")
            for error in passes[0].errors:
                self.problem(stop.line, f"[{stop.label}] expect: {error}")
            for text, value in zip(stop.show, passes[0].after, strict=True):
                if value is None:
                    self.problem(
                        stop.line, f"[{stop.label}] show: `{text}` has no value after the range"
                    )
            if not stop.any_order:
                now, previous = passes[0].seq, stop.label

    def _why_missed(self, stop: Directive, probe: Probe) -> str:
        assert probe.function is not None
        function = probe.function.name
        if not probe.found:
            return f"is in `{function}`, which no module defines when the scenario runs"
        statements = [s for s in probe.statements if probe.can_run(s)]
        if not probe.lines:
            return f"never runs: `{function}` is not called in scenario {self.document.scenario!r}"
        for which, statement in (("first", statements[0]), ("last", statements[-1])):
            if not probe.ran(statement):
                line = first_line(statement)
                reached = max((n for n in probe.lines if n < line), default=min(probe.lines))
                return (
                    f"never runs its {which} line: L{line} "
                    f"`{probe.source.lines[line - 1].strip()}`; the nearest line reached is "
                    f"L{reached} `{probe.source.lines[reached - 1].strip()}`"
                )
        if not probe.passes:
            notes = "; ".join(probe.when_notes)
            return (
                f"when: `{stop.when}` holds in none of {probe.num_passes} passes"
                f"{' (' + notes + ')' if notes else ''}"
            )
        return ""

    def _look_at_static(self, stop: Directive, probe: Probe) -> None:
        """A stop's constants and fields have values when their module has been imported."""
        record = Pass(0, 1, [None] * len(stop.show))
        if stop.show or stop.expect:
            try:
                with self._paths():
                    module = __import__(probe.source.module, fromlist=["*"])
            except ImportError as e:
                self.problem(stop.line, f"[{stop.label}] cannot be imported: {e}")
                return
            namespace = {**vars(builtins), **vars(module)}
            for text, expression in [(t, Expression(t)) for t in [*stop.show, *stop.expect]]:
                try:
                    value = expression.value(namespace)
                except Exception as e:
                    self.problem(
                        stop.line, f"[{stop.label}] `{text}` fails: {type(e).__name__}: {e}"
                    )
                    return
                if text in stop.show:
                    record.after.append(summarize(value))
                if text in stop.expect and not value:
                    why = expression.explain(namespace)
                    self.problem(stop.line, f"[{stop.label}] expect: `{text}` is false: {why}")
        self.seen[stop.label] = [record]

    def lines_not_run(self, label: str) -> list[int]:
        """Statements inside a stop's range that did not run in the whole scenario."""
        probe = self.probes[label]
        return [first_line(s) for s in probe.statements if probe.can_run(s) and not probe.ran(s)]

    # ---- what comes of it ------------------------------------------------------------------------

    def value_rows(self, stop: Directive) -> tuple[list[str], list[list[str]]]:
        """The table of a stop's values: header and rows, in markdown."""

        def cell(value: str | None) -> str:
            return ABSENT if value is None else code(value)

        passes = self.seen.get(stop.label, [])
        if not passes or not stop.show:
            return [], []
        if stop.rows:
            header = ["pass", *map(code, stop.show)]
            return header, [[str(p.nth), *map(cell, p.after)] for p in passes]
        before, after = passes[0].before, passes[0].after
        if all(b in (None, a) for b, a in zip(before, after, strict=True)):
            return ["", "value"], [
                [code(t), cell(a)] for t, a in zip(stop.show, after, strict=True)
            ]
        return ["", "before", "after"], [
            [code(t), cell(b), cell(a)] for t, b, a in zip(stop.show, before, after, strict=True)
        ]

    def table(self, stop: Directive) -> str:
        """The table of a stop's values; the one in the text, if it says the same within the
        tolerance: floats differ between machines, and generated files must not."""
        header, rows = self.value_rows(stop)
        new = table_of(header, rows) if header else ""
        old = self.document.tables.get(stop.label, "")
        return old if same_text(old, new) else new

    @property
    def accepted_file(self) -> Path:
        return self.project.walkthroughs / ".accepted" / f"{self.name}.json"

    def accepted(self) -> dict[str, dict[str, list[str]]]:
        """What the code said when the prose about it was last read: by label, the anchor and its
        text."""
        if not self.accepted_file.is_file():
            return {}
        loaded: dict[str, dict[str, list[str]]] = json.loads(self.accepted_file.read_text("utf-8"))
        return loaded

    def summary(self) -> str:
        """One line: what was looked at, what ran."""
        stops = self.document.stops
        static = [s for s in stops if s.label in self.probes and self.probes[s.label].static]
        ran = sum(s.label in self.seen for s in stops) - sum(s.label in self.seen for s in static)
        idle = [
            f"[{stop.label}] {', '.join(f'L{n}' for n in self.lines_not_run(stop.label))}"
            for stop in stops
            if stop.label in self.seen and self.lines_not_run(stop.label)
        ]
        text = (
            f"{self.name}: {len(self.ranges)} anchors; stops: {ran} of {len(stops) - len(static)} "
            f"ran, {len(static)} static; {self.seconds:.2f} s"
        )
        return text + (f"; did not run: {'; '.join(idle)}" if idle else "")
