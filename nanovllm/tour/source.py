"""Source files as the tour sees them: symbols, statements, and text to compare.

Everything here is derived from the syntax tree; nothing is imported or run.
"""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Symbol:
    """A name that an anchor can give, and its lines (1-based, both included).

    `rank`: 0 what is defined (class, function, constant, field), 1 a module, 2 an attribute set in
    `__init__`. Of equal names the lowest rank is meant.
    """

    path: str
    qualname: str
    first: int
    last: int
    rank: int
    is_class: bool = False

    def __str__(self) -> str:
        return f"{self.path}::{self.qualname}" if self.qualname else self.path


def first_line(node: ast.stmt) -> int:
    """Where a statement begins, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def last_line(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def header_lines(node: ast.stmt) -> range:
    """The lines of a statement without the blocks under it."""
    last = last_line(node)
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if isinstance(body, list) and body:
        inner = body[0].pattern.lineno if isinstance(node, ast.Match) else first_line(body[0])
        last = max(node.lineno, inner - 1)
    return range(first_line(node), last + 1)


def is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


class SourceFile:
    """One Python file."""

    def __init__(self, root: Path, path: str) -> None:
        self.path = path
        self.text = (root / path).read_text(encoding="utf-8")
        self.lines = self.text.splitlines()
        self.tree = ast.parse(self.text, filename=path)

    @cached_property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def symbols(self) -> list[Symbol]:
        module = Symbol(self.path, "", 1, max(len(self.lines), 1), rank=1)
        return [module, *self._symbols_in(self.tree.body, "")]

    def _symbols_in(self, body: list[ast.stmt], prefix: str) -> Iterator[Symbol]:
        for node in body:
            if isinstance(node, (*FUNCTION, ast.ClassDef)):
                decorators = [ast.unparse(d) for d in node.decorator_list]
                if any(d.endswith((".setter", ".deleter", "overload")) for d in decorators):
                    continue
                is_class = isinstance(node, ast.ClassDef)
                yield self._symbol(prefix + node.name, node, is_class=is_class)
                yield from self._symbols_in(node.body, f"{prefix}{node.name}.")
                if isinstance(node, FUNCTION) and node.name == "__init__":
                    yield from self._attributes_in(node, prefix)
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                    continue
                yield from self._symbols_in(node.body, prefix)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    # A function's local variables are no symbols; a class's or module's are.
                    if isinstance(target, ast.Name) and self._holds_names(prefix):
                        yield self._symbol(prefix + target.id, node)

    def _holds_names(self, prefix: str) -> bool:
        body: list[ast.stmt] = self.tree.body
        for part in prefix.split(".")[:-1]:
            found = [n for n in body if isinstance(n, ast.ClassDef) and n.name == part]
            if not found:
                return False
            body = found[0].body
        return True

    def _attributes_in(self, init: FunctionNode, prefix: str) -> Iterator[Symbol]:
        seen = set()
        for node in ast.walk(init):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    name = ast.unparse(target)
                    attribute = name.removeprefix("self.")
                    if name != attribute and attribute.isidentifier() and attribute not in seen:
                        seen.add(attribute)
                        yield self._symbol(prefix + attribute, node, rank=2)

    def _symbol(
        self, qualname: str, node: ast.stmt, rank: int = 0, is_class: bool = False
    ) -> Symbol:
        return Symbol(self.path, qualname, first_line(node), last_line(node), rank, is_class)

    @cached_property
    def statements(self) -> list[ast.stmt]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt)]

    def statement_at(self, line: int) -> ast.stmt | None:
        """The outermost statement that begins at `line`."""
        found = [node for node in self.statements if first_line(node) == line]
        return max(found, key=last_line, default=None)

    def enclosing_function(self, line: int) -> FunctionNode | None:
        """The innermost function that begins at `line` or has it inside."""
        functions = [n for n in self.statements if isinstance(n, FUNCTION)]
        around = [n for n in functions if first_line(n) <= line <= last_line(n)]
        return max(around, key=first_line, default=None)

    def runnable(self, function: FunctionNode, first: int, last: int) -> list[ast.stmt]:
        """Statements under `function` that begin in lines [first, last] and can run, in order."""
        found = []
        for node in ast.walk(function):
            if not isinstance(node, ast.stmt) or node is function:
                continue
            if not first <= first_line(node) <= last or is_docstring(node):
                continue
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                continue
            if isinstance(node, ast.AnnAssign) and node.value is None:
                continue
            found.append(node)
        return sorted(found, key=first_line)

    # ---- text to compare -------------------------------------------------------------------------

    @cached_property
    def _without_comments(self) -> list[str]:
        """The lines, comments cut off. Only their positions are taken from `tokenize`, whose other
        tokens differ between Python versions."""
        lines = list(self.lines)
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column].rstrip()
        return lines

    def content(self, first: int, last: int, outline: bool = False) -> list[str]:
        """What an anchor's text says: dedented, without comments and blank lines. Docstrings stay:
        they state contracts.

        Args:
            outline: leave the bodies of functions out. What names a class speaks of what it is.
        """
        skipped: set[int] = set()
        if outline:
            for node in self.statements:
                if isinstance(node, FUNCTION) and first <= node.lineno <= last:
                    skipped.update(range(header_lines(node).stop, last_line(node) + 1))
        kept = [
            line
            for number, line in enumerate(self._without_comments[first - 1 : last], first)
            if line.strip() and number not in skipped
        ]
        return textwrap.dedent("\n".join(kept)).splitlines()
