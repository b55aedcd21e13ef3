"""Anchors: code named by what it is, not by where it is.

An anchor is a symbol, or a symbol and the text of a line in it to start at and, if need be, one to
end at. It must match exactly one place; otherwise the error names what came near.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nanovllm.tour.source import SourceFile, Symbol, last_line


class AnchorError(ValueError):
    """An anchor that matches nothing, or more than one place."""


@dataclass(frozen=True)
class Anchor:
    """`at`, `from`, `to` of a walkthrough's directive."""

    at: str
    start: str = ""
    end: str = ""

    def spec(self) -> list[str]:
        return [part for part in (self.at, self.start, self.end) if part]


@dataclass(frozen=True)
class Range:
    """Where an anchor is now: a file and lines, 1-based, both included; `first` 0: the file."""

    path: str
    first: int
    last: int
    outline: bool = False

    def link(self) -> str:
        if not self.first:
            return self.path
        last = f"-L{self.last}" if self.last > self.first else ""
        return f"{self.path}#L{self.first}{last}"


class Project:
    """The repository: a package, and beside it tests, scripts and walkthroughs."""

    def __init__(self, root: Path, package: str = "nanovllm") -> None:
        self.root = root.resolve()
        self.package = package
        self._files: dict[str, SourceFile] = {}

    @property
    def walkthroughs(self) -> Path:
        return self.root / "walkthroughs"

    def file(self, path: str) -> SourceFile:
        if path not in self._files:
            self._files[path] = SourceFile(self.root, path)
        return self._files[path]

    def _symbols_under(self, folders: Sequence[str]) -> list[Symbol]:
        paths: Iterator[Path] = (
            path for folder in folders for path in sorted((self.root / folder).rglob("*.py"))
        )
        return [
            symbol
            for path in paths
            for symbol in self.file(path.relative_to(self.root).as_posix()).symbols
        ]

    @cached_property
    def package_symbols(self) -> list[Symbol]:
        return self._symbols_under([self.package])

    @cached_property
    def other_symbols(self) -> list[Symbol]:
        return self._symbols_under(["tests", "scripts", "walkthroughs/scenarios"])

    def find_symbol(self, name: str) -> Symbol:
        """The symbol called `name`: any ending of its dotted path (`Scheduler.schedule`,
        `scheduler.Scheduler`), or `path.py::Name` with any ending of the path. The package is
        searched first, then tests, scripts and scenarios.

        Raises:
            AnchorError: there is none, or there are several.
        """
        for symbols in (self.package_symbols, self.other_symbols):
            found = [symbol for symbol in symbols if self._is_called(symbol, name)]
            if found:
                lowest = min(symbol.rank for symbol in found)
                found = [symbol for symbol in found if symbol.rank == lowest]
                if len(found) == 1:
                    return found[0]
                places = ", ".join(f"{symbol} (line {symbol.first})" for symbol in found[:6])
                raise AnchorError(f"`{name}` names {len(found)} symbols: {places}")
        raise AnchorError(f"no symbol `{name}`{self._near_symbols(name)}")

    def _is_called(self, symbol: Symbol, name: str) -> bool:
        if "::" in name:
            path, _, qualname = name.partition("::")
            return symbol.qualname == qualname and f"/{symbol.path}".endswith(f"/{path}")
        if not symbol.qualname and name.endswith(".py"):
            return f"/{symbol.path}".endswith(f"/{name}")
        dotted = f".{self.file(symbol.path).module}"
        if symbol.qualname:
            dotted += f".{symbol.qualname}"
        return dotted.endswith(f".{name}")

    def _near_symbols(self, name: str) -> str:
        qualname = name.rpartition("::")[2]
        names = {s.qualname: s for s in self.package_symbols + self.other_symbols if s.qualname}
        last = qualname.rpartition(".")[2]
        near = [n for n in names if n.rpartition(".")[2] == last]
        near += difflib.get_close_matches(qualname, list(names), n=3, cutoff=0.7)
        near = list(dict.fromkeys(near))[:4]
        return f"; near: {', '.join(str(names[n]) for n in near)}" if near else ""

    def resolve(self, anchor: Anchor, is_stop: bool = False) -> Range:
        """Find an anchor's lines.

        Raises:
            AnchorError: it matches no place, or several.
        """
        symbol = self.find_symbol(anchor.at)
        if not anchor.start and not anchor.end:
            if not symbol.qualname:
                return Range(symbol.path, 0, 0)
            outline = symbol.is_class and not is_stop
            return Range(symbol.path, symbol.first, symbol.last, outline)
        source = self.file(symbol.path)
        first = symbol.first
        if anchor.start:
            first = self._find_line(source, symbol, anchor.start, symbol.first, "from")
        if anchor.end:
            return Range(
                symbol.path,
                first,
                self._statement_end(
                    source, self._find_line(source, symbol, anchor.end, first, "to")
                ),
            )
        return Range(symbol.path, first, self._statement_end(source, first))

    @staticmethod
    def _statement_end(source: SourceFile, line: int) -> int:
        statement = source.statement_at(line)
        return last_line(statement) if statement else line

    @staticmethod
    def _find_line(source: SourceFile, symbol: Symbol, text: str, after: int, key: str) -> int:
        """The only line of `symbol`, from line `after` on, with `text` in it."""
        lines = range(after, symbol.last + 1)
        found = [n for n in lines if text in source.lines[n - 1]]
        if len(found) == 1:
            return found[0]
        if found:
            places = ", ".join(f"line {n} `{source.lines[n - 1].strip()}`" for n in found[:4])
            raise AnchorError(f"{key}: {text!r} is in {len(found)} lines of `{symbol}`: {places}")
        numbers = {source.lines[n - 1].strip(): n for n in lines if source.lines[n - 1].strip()}
        near = difflib.get_close_matches(text, list(numbers), n=3, cutoff=0.5)
        hint = "; near: " + ", ".join(f"line {numbers[n]} `{n}`" for n in near) if near else ""
        where = f" after line {after}" if after > symbol.first else ""
        raise AnchorError(f"{key}: no line of `{symbol}`{where} has {text!r}{hint}")

    def content(self, place: Range) -> list[str]:
        """An anchor's text as it is accepted: see SourceFile.content. Empty for a whole file."""
        if not place.first:
            return []
        return self.file(place.path).content(place.first, place.last, place.outline)
