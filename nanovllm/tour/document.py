"""A walkthrough's markdown, taken apart: directives, links, pages of prose, what the tool owns."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.common.utils import normalizeReference
from markdown_it.token import Token

from nanovllm.tour.anchors import Anchor, Range

FOOTER = "<!-- links to code: written by `nanovllm walkthrough fix`, do not edit from here on -->"
COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
VALUES = re.compile(
    r"<!-- values (?P<label>[^\n]+?) -->\n(?P<table>.*?)<!-- /values -->", re.DOTALL
)
KEY = re.compile(r"\s*(at|from|to|show|when|expect|rows|order)\s*:\s?(.*)")
LABEL = re.compile(r"\[((?:[^\[\]`]|`[^`\n]*`)+)\]")
FENCE = re.compile(r"^ {0,3}(```+|~~~+)[^\n]*\n.*?(?:^ {0,3}\1[`~]*[ ]*$|\Z)", re.DOTALL | re.M)
NUMERAL = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w]|\.\d)")
# A code span counts as a statement of numbers only if it is one, or says what something equals.
STATES_NUMBER = re.compile(r"(?:.*=\s*)?-?\d[\d.,]*")
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\1(?!`)", re.DOTALL)
LINK_PREFIX = "anchor:"
TEXT_LINK = re.compile(r"\[((?:[^\[\]`]|`[^`]*`)+)\]\[([^\[\]]*)\]")  # [text][label]
BARE_LINK = re.compile(r"\[((?:[^\[\]`#]|`[^`]*`)+)\](?![\[(:])")  # [label]


class DocumentError(ValueError):
    """A directive that cannot be understood. `line` is where it stands."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass
class Directive:
    """`<!-- stop LABEL ... -->` or `<!-- anchor LABEL ... -->`."""

    label: str
    line: int
    anchor: Anchor
    is_stop: bool
    show: list[str] = field(default_factory=list)
    when: str = ""
    expect: list[str] = field(default_factory=list)
    rows: int = 0
    any_order: bool = False


@dataclass
class Page:
    """What is read at one go: a heading's prose, or a stop's."""

    line: int
    text: str = ""
    stop: Directive | None = None

    @property
    def title(self) -> str:
        match = re.search(r"^#{1,6} +(.+?)\s*#*$", self.text, re.M)
        return match[1] if match else ""

    @property
    def prose(self) -> str:
        """Without directives and tables of values."""
        return re.sub(r"\n{3,}", "\n\n", COMMENT.sub("", VALUES.sub("", self.text))).strip()


@dataclass
class Link:
    href: str
    text: str
    line: int
    is_image: bool = False


def make_markdown() -> MarkdownIt:
    return MarkdownIt("commonmark").enable("table")


class Document:
    """One walkthrough.

    Raises:
        DocumentError: a directive cannot be understood.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.body, _, self.footer = text.partition(FOOTER)
        # Fenced code is shown, never obeyed.
        self._plain = FENCE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), self.body)
        self.scenario = ""
        self.directives: dict[str, Directive] = {}
        self.not_run: list[tuple[int, set[str]]] = []
        self._starts: list[tuple[int, Directive]] = []
        for match in COMMENT.finditer(self._plain):
            self._read_comment(match)
        # Their expressions may look like links: x["a"]["b"].
        self._plain = COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), self._plain)

    def _line_of(self, offset: int) -> int:
        return self.body.count("\n", 0, offset) + 1

    def _read_comment(self, match: re.Match[str]) -> None:
        line = self._line_of(match.start())
        head, _, rest = match[1].strip().partition("\n")
        word, _, argument = head.strip().partition(" ")
        argument = argument.strip()
        if word == "scenario:":
            self.scenario = "" if argument == "none" else argument
        elif word == "not-run:":
            self.not_run.append((line, set((argument + " " + rest).split())))
        elif word in ("stop", "anchor"):
            if argument in self.directives:
                raise DocumentError(line, f"label `{argument}` is given twice")
            directive = _read_directive(argument, line, rest, word == "stop")
            self.directives[argument] = directive
            if directive.is_stop:
                self._starts.append((match.start(), directive))
        elif word.rstrip(":") in ("stop", "anchor", "scenario", "not-run", "show", "expect"):
            raise DocumentError(line, f"`{word} {argument}` is no directive; {_SYNTAX}")

    @cached_property
    def tables(self) -> dict[str, str]:
        """The tables of values in the text, by label."""
        return {match["label"]: match["table"] for match in VALUES.finditer(self.body)}

    @property
    def stops(self) -> list[Directive]:
        return [d for d in self.directives.values() if d.is_stop]

    @cached_property
    def title(self) -> str:
        match = re.search(r"^# +(.+?)\s*#*$", self._plain, re.M)
        return match[1] if match else self.name

    @cached_property
    def pages(self) -> list[Page]:
        """A page begins at each heading and at each stop; a stop right under its heading shares the
        heading's page."""
        cuts: dict[int, Directive | None] = {
            match.start(): None for match in re.finditer(r"^#{1,6} ", self._plain, re.M)
        }
        cuts.update(self._starts)
        offsets = sorted({0, *cuts})
        pages: list[Page] = []
        for start, end in zip(offsets, [*offsets[1:], len(self.body)], strict=True):
            stop, text = cuts.get(start), self.body[start:end]
            if stop and pages and pages[-1].stop is None and _only_heading(pages[-1].text):
                pages[-1].text += text
                pages[-1].stop = stop
            else:
                pages.append(Page(self._line_of(start), text, stop))
        return [page for page in pages if page.prose or page.stop]

    # ---- links -----------------------------------------------------------------------------------

    @cached_property
    def _candidates(self) -> dict[str, str]:
        """Labels that may name code, by what markdown makes of them."""
        found: dict[str, str] = {}
        for match in LABEL.finditer(self._plain):
            label = match[1].strip()
            if label in self.directives or re.fullmatch(r"`[^`]+`", label):
                found.setdefault(normalizeReference(label), label)
        return found

    def anchor_of(self, label: str) -> Anchor:
        if label in self.directives:
            return self.directives[label].anchor
        return Anchor(label.strip("`"))

    def parse(self, text: str) -> list[Token]:
        """Markdown tokens; a link to code has the href `anchor:LABEL`."""
        references = {
            key: {"href": LINK_PREFIX + label, "title": ""}
            for key, label in self._candidates.items()
        }
        return make_markdown().parse(text, {"references": references})

    @cached_property
    def links(self) -> list[Link]:
        return [link for link in links_in(self.parse(self.body), 0) if link.href]

    @cached_property
    def labels(self) -> list[str]:
        """Labels of code that is linked to or stopped at, in order."""
        linked = [
            link.href.removeprefix(LINK_PREFIX)
            for link in self.links
            if link.href.startswith(LINK_PREFIX)
        ]
        return list(dict.fromkeys([*(s.label for s in self.stops), *linked]))

    @staticmethod
    def replace_links(text: str, replace: Callable[[str, str], str | None]) -> str:
        """Prose with its reference links replaced by `replace(label, shown text)`; None: kept."""
        text = TEXT_LINK.sub(lambda m: replace(m[2] or m[1], m[1]) or m[0], text)
        return BARE_LINK.sub(lambda m: replace(m[1], m[1]) or m[0], text)

    def problems(self) -> Iterator[tuple[int, str]]:
        """Labels that mean nothing, and directives nobody uses."""
        for match in re.finditer(r"\]\[([^\[\]\n]+)\]", _without_code(self._plain)):
            key = normalizeReference(match[1])
            if key not in self._candidates and not re.search(
                rf"^ {{0,3}}\[{re.escape(match[1])}\]:", self.body, re.M | re.I
            ):
                known = ", ".join(self.directives) or "none"
                yield (
                    self._line_of(match.start()),
                    f"[{match[1]}] is no label of this walkthrough (labels: {known})",
                )
        spelled: dict[str, str] = {}
        for label in self.labels:
            other = spelled.setdefault(normalizeReference(label), label)
            if other != label:
                yield 1, f"labels [{other}] and [{label}] are the same to markdown"
        for label, directive in self.directives.items():
            if label not in self.labels:
                yield directive.line, f"anchor [{label}] is not used"

    # ---- numerals --------------------------------------------------------------------------------

    def uncovered_numerals(self, tables: dict[str, str]) -> Iterator[tuple[int, str]]:
        """Numerals of the prose that no claim or table up to the end of their section, no link and
        no `not-run` covers.

        Args:
            tables: a stop's table of values by its label.
        """
        sections = [m.start() for m in re.finditer(r"^#{1,6} ", self._plain, re.M)]
        sections = sorted({0, *sections})
        covered: set[str] = set()
        for start, end in zip(sections, [*sections[1:], len(self.body)], strict=True):
            text = self.body[start:end]
            first, last = self._line_of(start), self._line_of(end)
            for stop in self.stops:
                if first <= stop.line <= last:
                    said = " ".join([tables.get(stop.label, ""), *stop.expect])
                    covered.update(_numerals(said))
            marked = {n for line, ns in self.not_run if first <= line <= last for n in ns}
            bare = COMMENT.sub(_blank, VALUES.sub(_blank, text))
            for line, word in _prose_words(self.parse(bare)):
                for numeral in _numerals(word):
                    if numeral not in covered and numeral not in marked:
                        yield first + line, numeral


_SYNTAX = "a directive is `stop LABEL`, `anchor LABEL`, `scenario: NAME` or `not-run: 1 2`"


def _read_directive(label: str, line: int, text: str, is_stop: bool) -> Directive:
    if not label:
        raise DocumentError(line, f"a label is missing; {_SYNTAX}")
    values: dict[str, list[str]] = {}
    key = ""
    for offset, row in enumerate(text.splitlines(), 1):
        if match := KEY.fullmatch(row):
            key = match[1]
            values.setdefault(key, []).append(match[2].strip())
        elif row.strip():
            if not key:
                raise DocumentError(line + offset, f"`{row.strip()}` is not `key: value`")
            values[key][-1] += " " + row.strip()
    for key, given in values.items():
        if len(given) > 1 and key not in ("show", "expect"):
            raise DocumentError(line, f"`{key}:` is given twice")
        if not is_stop and key not in ("at", "from", "to"):
            raise DocumentError(line, f"`{key}:` belongs to a stop, and [{label}] is an anchor")

    def one(key: str) -> str:
        return values.get(key, [""])[0]

    if one("order") not in ("", "any"):
        raise DocumentError(line, f"order: {one('order')!r} is not `any`")
    if not re.fullmatch(r"\d*", one("rows")):
        raise DocumentError(line, f"rows: {one('rows')!r} is not a number")
    show = [part for row in values.get("show", []) for part in _split_expressions(row, line)]
    return Directive(
        label,
        line,
        Anchor(one("at") or label.strip("`"), one("from").strip("`"), one("to").strip("`")),
        is_stop,
        show,
        one("when"),
        values.get("expect", []),
        int(one("rows") or 0),
        one("order") == "any",
    )


def _split_expressions(text: str, line: int) -> list[str]:
    """`a, f(b, c)` -> `a`, `f(b, c)`."""
    try:
        tree = ast.parse(f"({text},)", mode="eval").body
    except SyntaxError as e:
        raise DocumentError(line, f"show: {text!r} is not Python: {e.msg}") from None
    assert isinstance(tree, ast.Tuple)
    return [ast.get_source_segment(f"({text},)", item) or "" for item in tree.elts]


def _only_heading(text: str) -> bool:
    return re.fullmatch(r"\s*#{1,6} [^\n]*\s*", COMMENT.sub("", text)) is not None


def _blank(match: re.Match[str]) -> str:
    """As many lines, with nothing on them."""
    return "\n" * match[0].count("\n")


def _without_code(text: str) -> str:
    """Code spans that are no labels, blanked; lines and lengths stay."""

    def blank(match: re.Match[str]) -> str:
        if text[match.start() - 1 : match.start()] == "[" and text[match.end() :][:1] == "]":
            return match[0]
        return re.sub(r"[^\n]", " ", match[0])

    return CODE_SPAN.sub(blank, text)


def _numerals(text: str) -> list[str]:
    return [n.rstrip(",").replace(",", "") for n in NUMERAL.findall(text)]


def links_in(tokens: list[Token], line: int) -> Iterator[Link]:
    for token in tokens:
        line = token.map[0] + 1 if token.map else line
        current: Link | None = None
        for child in token.children or []:
            if child.type == "link_open":
                current = Link(unquote(str(child.attrs["href"])), "", line)
            elif child.type == "link_close" and current:
                yield current
                current = None
            elif child.type == "image":
                yield Link(unquote(str(child.attrs["src"])), child.content, line, is_image=True)
            elif current:
                current.text += child.content


def _prose_words(tokens: list[Token]) -> Iterator[tuple[int, str]]:
    """Text outside of headings, links, fences; code spans only where they state a number."""
    line, heading = 0, False
    for token in tokens:
        line = token.map[0] if token.map else line
        heading = token.type == "heading_open" or (heading and token.type != "heading_close")
        if token.type != "inline" or heading:
            continue
        depth, at = 0, line
        for child in token.children or []:
            depth += {"link_open": 1, "link_close": -1}.get(child.type, 0)
            if child.type in ("softbreak", "hardbreak"):
                at += 1
            elif depth == 0 and (
                child.type == "text"
                or (child.type == "code_inline" and STATES_NUMBER.fullmatch(child.content))
            ):
                yield at, child.content


def footer_text(definitions: dict[str, Range], prefix: str = "../") -> str:
    """The footer with one reference definition a label."""
    rows = [f"[{label}]: {prefix}{place.link()}" for label, place in definitions.items()]
    return "\n".join([FOOTER, "", *rows, ""])


def read_footer(footer: str) -> dict[str, str]:
    """Label -> link."""
    return {m[1]: m[2] for m in re.finditer(r"^\[(.+)\]: (\S+)$", footer, re.M)}


def table_of(header: list[str], rows: list[list[str]]) -> str:
    def row(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    return row(header) + "|" + "---|" * len(header) + "\n" + "".join(map(row, rows))


def code(text: Any) -> str:
    """A code span, also of text with backticks."""
    return f"`` {text} ``" if "`" in str(text) else f"`{text}`"
