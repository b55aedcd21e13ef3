"""`nanovllm tour`: a walkthrough in the terminal, page by page, or live in pdb."""

from __future__ import annotations

import bdb
import contextlib
import pdb
import sys
from types import FrameType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from nanovllm.exceptions import VLLMValidationError
from nanovllm.tour.anchors import Project, Range
from nanovllm.tour.document import Directive
from nanovllm.tour.recorder import Probe, Recorder
from nanovllm.tour.walkthrough import Walkthrough, find_names

CONTEXT = 2  # lines of source shown around a range
KEYS = "Enter or n next, b back, a number to jump, q quit"


def list_tours(project: Project) -> None:
    """Print name, title and scenario of each walkthrough."""
    table = Table("name", "title", "scenario", "stops", box=None, pad_edge=False)
    for name in find_names(project):
        document = Walkthrough(project, name).document
        stops = str(len(document.stops))
        table.add_row(name, document.title, document.scenario or "none", stops)
    Console().print(table)


class Pager:
    """Renders the pages of a recorded walkthrough."""

    def __init__(self, walkthrough: Walkthrough) -> None:
        self.walkthrough = walkthrough
        self.pages = walkthrough.document.pages

    def render(self, index: int) -> RenderableType:
        """One page: progress, prose, source with the range lit, values."""
        page = self.pages[index]
        done = "█" * (index + 1) + "░" * (len(self.pages) - index - 1)
        head = f"{self.walkthrough.name}  {index + 1}/{len(self.pages)}  {done}"
        parts: list[RenderableType] = [Text(head, style="dim"), Text()]
        parts.append(Markdown(self._readable(page.prose), hyperlinks=False))
        if page.stop and page.stop.label in self.walkthrough.ranges:
            parts += self._source(self.walkthrough.ranges[page.stop.label])
            parts += self._values(page.stop)
        return Group(*parts, Text())

    def _readable(self, prose: str) -> str:
        """Prose with the links to code reduced to their text, which is all a terminal can show."""
        ranges = self.walkthrough.ranges
        return self.walkthrough.document.replace_links(
            prose, lambda label, shown: shown if label in ranges else None
        )

    def _source(self, place: Range) -> list[RenderableType]:
        source = self.walkthrough.project.file(place.path)
        first = max(place.first - CONTEXT, 1)
        last = min(place.last + CONTEXT, len(source.lines))
        code = Syntax(
            source.text,
            "python",
            line_numbers=True,
            line_range=(first, last),
            highlight_lines=set(range(place.first, place.last + 1)),
            word_wrap=True,
            theme="ansi_dark",
        )
        code.stylize_range("dim", (first, 0), (place.first, 0))
        code.stylize_range("dim", (place.last + 1, 0), (last + 1, 0))
        where = f"{place.path}:{place.first}"
        return [Text(), Text(where, style="bold"), code]

    def _values(self, stop: Directive) -> list[RenderableType]:
        header, rows = self.walkthrough.value_rows(stop)
        if not header:
            return []
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in header:
            table.add_column(title.strip("` "), overflow="fold")
        for row in rows:
            cells = [Text(cell.strip("` ")) for cell in row]
            if header[-2:] == ["before", "after"] and row[-1] != row[-2]:
                cells[-1].stylize("bold green")
            table.add_row(*cells)
        return [Text(), table]


def record(project: Project, name: str) -> Walkthrough:
    """A walkthrough with its scenario run.

    Raises:
        VLLMValidationError: it cannot be read or run.
    """
    walkthrough = Walkthrough(project, name)
    walkthrough.record()
    if not walkthrough.document.text or (walkthrough.problems and not walkthrough.seen):
        raise VLLMValidationError(str(walkthrough.problems[0]))
    return walkthrough


def run_tour(project: Project, name: str, console: Console | None = None) -> None:
    """Page through a walkthrough; print all of it when nobody can press keys."""
    console = console or Console()
    walkthrough = record(project, name)
    for problem in walkthrough.problems:
        console.print(Text(f"out of date: {problem}", style="yellow"))
    pager = Pager(walkthrough)
    if not (console.is_terminal and sys.stdin.isatty()):
        for index in range(len(pager.pages)):
            console.print(pager.render(index))
        return
    index = 0
    while True:
        console.clear()
        console.print(pager.render(index))
        moved = next_index(console.input(f"[dim]{KEYS}: [/dim]"), index, len(pager.pages))
        if moved is None:
            return
        index = moved


def next_index(answer: str, index: int, count: int) -> int | None:
    """Where an answer leads; None: out. Past the last page is out; what makes no sense stays."""
    answer = answer.strip().lower()
    if answer in ("q", "quit"):
        return None
    if answer in ("", "n", "next"):
        return index + 1 if index + 1 < count else None
    if answer in ("b", "back", "p"):
        return max(index - 1, 0)
    if answer.isdigit():
        return min(max(int(answer) - 1, 0), count - 1)
    return index


class StopPdb(pdb.Pdb):
    """pdb that opens at a line which is about to run, and after `continue` leaves the recorder at
    work. `set_trace(frame)` would open one line late."""

    def open(self, frame: FrameType, recorder: Recorder) -> None:
        self.recorder = recorder
        self.reset()
        self.botframe: Any = frame
        self.interaction(frame, None)
        self.opened_at: tuple[FrameType, int] | None = (frame, frame.f_lineno)
        if self.quitting:
            raise bdb.BdbQuit
        if self.stoplineno != -1:  # next, step, until, return: pdb takes over from here
            caller: FrameType | None = frame
            while caller:
                caller.f_trace = self.trace_dispatch
                self.botframe, caller = caller, caller.f_back
            sys.settrace(self.trace_dispatch)

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """While stepping. Before 3.12 the recorder is fed from here, for there is but one trace
        function."""
        watched: Any = None
        if sys.version_info < (3, 12):
            watched = self.recorder.trace_call(frame, event, arg)
        if watched is not None and event in ("line", "return"):
            self.recorder.trace_frame(frame, event, arg)  # may open the next stop
        opened_at, self.opened_at = self.opened_at, None
        if event == "line" and opened_at == (frame, frame.f_lineno):
            return self.trace_dispatch
        wanted: Any = super().trace_dispatch(frame, event, arg)
        return watched if wanted is None else wanted

    def set_continue(self) -> None:
        self._set_stopinfo(self.botframe, None, -1)  # type: ignore[attr-defined, unused-ignore]
        if sys.version_info >= (3, 12):
            sys.settrace(None)
            return
        # Before 3.12 the recorder is a trace function itself.
        frame: FrameType | None = sys._getframe()
        while frame:
            watched = self.recorder.trace_call(frame, "call", None)
            frame.f_trace = watched
            frame = frame.f_back
        sys.settrace(self.recorder.trace_call)


def run_live(project: Project, name: str) -> None:
    """Run the scenario and open pdb at each stop, in the pass that the walkthrough tells of."""
    walkthrough = record(project, name)
    pager = Pager(walkthrough)
    console = Console()
    page_of = {page.stop.label: n for n, page in enumerate(pager.pages) if page.stop}
    live = Walkthrough(project, name)
    stop_of = {id(p): label for label, p in live.probes.items()}
    debugger = StopPdb(skip=["nanovllm.tour.*", "contextlib"])
    debugger.rcLines = []
    recorders: list[Recorder] = []

    def on_pass(probe: Probe, nth: int, frame: FrameType) -> None:
        label = stop_of[id(probe)]
        passes = walkthrough.seen.get(label)
        if not passes or passes[0].nth != nth:
            return
        index = page_of[label]
        page = pager.pages[index]
        head = f"{page.title or label} ({index + 1}/{len(pager.pages)}); c: on to the next stop"
        console.print()
        console.rule(Text(head, style="bold"))
        console.print(Markdown(pager._readable(page.prose), hyperlinks=False))
        debugger.open(frame, recorders[0])

    with contextlib.suppress(bdb.BdbQuit):
        live.run(on_pass, recorders.append)
        console.print("The scenario has ended.")
