"""Walkthroughs as static pages: prose on the left, on the right the source that it speaks of.

Each page carries everything it needs (the files it cites, style, script), so it opens from a disk
without a network.
"""

from __future__ import annotations

import html
import re
import shutil
import textwrap
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, get_lexer_by_name
from pygments.util import ClassNotFound

from nanovllm.tour.anchors import Project, Range
from nanovllm.tour.check import slug
from nanovllm.tour.document import LINK_PREFIX, Directive, Page
from nanovllm.tour.walkthrough import Walkthrough, find_names

LIGHT, DARK = "default", "github-dark"
KEYS = """<dialog><p><kbd>j</kbd> <kbd>→</kbd> next &emsp; <kbd>k</kbd> <kbd>←</kbd> back</p>
<p><kbd>Home</kbd> <kbd>End</kbd> first, last &emsp; <kbd>t</kbd> light or dark</p>
<p><kbd>s</kbd> source, on a narrow screen &emsp; <kbd>?</kbd> these keys</p>
<p>Line numbers in colour lead back to the prose about them.</p>
<form method="dialog"><button>close</button></form></dialog>"""
# Before anything is drawn.
THEME = """let t;try{t=localStorage.getItem("theme")}catch{}
document.documentElement.dataset.theme=
t||(matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light");"""


def write_html(project: Project, out: Path, names: Sequence[str] = ()) -> list[Path]:
    """Record the walkthroughs and write one page each, and an index.

    Returns:
        The files written.
    """
    out.mkdir(parents=True, exist_ok=True)
    walkthroughs = [Walkthrough(project, name) for name in names or find_names(project)]
    written = []
    for index, walkthrough in enumerate(walkthroughs):
        walkthrough.record()
        around = [*walkthroughs[max(index - 1, 0) : index], None][:1]
        around += [*walkthroughs[index + 1 : index + 2], None][:1]
        written.append(out / f"{walkthrough.name}.html")
        written[-1].write_text(_Renderer(walkthrough, out).page(*around), encoding="utf-8")
    items = "".join(
        f'<li><a href="{w.name}.html">{_inline(w.document.title)}</a></li>' for w in walkthroughs
    )
    written.append(out / "index.html")
    body = f'<div class="index"><h1>Walkthroughs</h1><ol class="pages">{items}</ol></div>'
    written[-1].write_text(_shell("Walkthroughs", "", body), encoding="utf-8")
    return written


def _static(name: str) -> str:
    return (resources.files("nanovllm.tour") / "static" / name).read_text(encoding="utf-8")


def _inline(text: str) -> str:
    return MarkdownIt().renderInline(text)


def _shell(title: str, nav: str, body: str) -> str:
    styles = HtmlFormatter(style=LIGHT).get_style_defs(".code")
    styles += HtmlFormatter(style=DARK).get_style_defs("[data-theme=dark] .code")
    # Backgrounds are ours.
    styles = re.sub(r"background(-color)?: #\w+;?", "", styles)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><script>{THEME}</script>
<style>{styles}\n{_static("page.css")}</style></head>
<body><header><a href="index.html">All</a>{nav}
<button class="theme" title="light or dark (t)" aria-label="light or dark">◐</button></header>
{body}
{KEYS}<script>{_static("page.js")}</script></body></html>
"""


class _Renderer:
    def __init__(self, walkthrough: Walkthrough, out: Path) -> None:
        self.walkthrough, self.out = walkthrough, out
        self.document = walkthrough.document
        self.markdown = MarkdownIt("commonmark", {"highlight": _highlight_fence}).enable("table")

    def page(self, before: Walkthrough | None, after: Walkthrough | None) -> str:
        pages = self.document.pages
        sections = "".join(self._section(n, page) for n, page in enumerate(pages))
        nav = "".join(
            f'<a href="{w.name}.html" rel="{rel}" title="{html.escape(w.document.title)}">{to}</a>'
            for w, rel, to in ((before, "prev", "‹ back"), (after, "next", "next ›"))
            if w is not None
        )
        nav += f'<span class="title">{_inline(self.document.title)}</span>'
        nav += '<span class="progress" aria-live="polite"></span>'
        body = f"""<main><article>{sections}</article>
<aside aria-label="source"><div class="where"><span></span>
<button class="close" aria-label="close the source">✕</button></div>
<div class="files" tabindex="0">{self._files()}</div><div class="live"></div></aside></main>"""
        return _shell(self.document.title, nav, body)

    def _place(self, stop: Directive | None) -> Range | None:
        place = self.walkthrough.ranges.get(stop.label) if stop else None
        return place if place and place.first else None

    def _section(self, number: int, page: Page) -> str:
        place = self._place(page.stop)
        data, after = "", ""
        if page.stop and place:
            data = " " + _data(place)
            source = self.walkthrough.project.file(place.path).lines[place.first - 1 : place.last]
            shown = "".join(
                f'<span class="line"><span class="num">{n}</span>{line}\n</span>'
                for n, line in enumerate(_lines(textwrap.dedent("\n".join(source))), place.first)
            )
            after = f'<pre class="code excerpt" tabindex="0">{shown}</pre>{self._values(page.stop)}'
        return f'<section id="p{number + 1}"{data}>{self._prose(page.prose)}{after}</section>\n'

    def _values(self, stop: Directive) -> str:
        header, rows = self.walkthrough.value_rows(stop)
        if not header:
            return ""
        compared = header[-2:] == ["before", "after"]
        head = "".join(f"<th>{_inline(cell)}</th>" for cell in header)
        body = ""
        for row in rows:
            cells = [f"<td>{_inline(cell)}</td>" for cell in row]
            if compared and row[-1] != row[-2]:
                cells[-1] = cells[-1].replace("<td>", '<td class="changed">')
            body += f"<tr>{''.join(cells)}</tr>"
        return (
            f'<div class="values"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def _prose(self, text: str) -> str:
        tokens = self.document.parse(text)
        opened: list[bool] = []
        for block in tokens:
            if block.type == "heading_open":
                following = tokens[tokens.index(block) + 1]
                block.attrSet("id", slug(following.content))
            for token in block.children or []:
                if token.type == "image":
                    token.attrSet("src", self._copied(str(token.attrs["src"])))
                elif token.type == "link_open":
                    opened.append(self._make_link(token))
                elif token.type == "link_close" and not opened.pop():
                    token.tag = "span"
        return str(self.markdown.renderer.render(tokens, self.markdown.options, {}))

    def _make_link(self, token: Any) -> bool:
        """Point a link somewhere on these pages; False: there is nowhere, so it is text."""
        href = str(token.attrs["href"])
        if href.startswith(LINK_PREFIX):
            place = self.walkthrough.ranges.get(href.removeprefix(LINK_PREFIX))
            if place is not None:
                token.attrs = {
                    "href": f"#{_file_id(place.path)}-L{max(place.first, 1)}",
                    "title": place.link(),
                    "data-file": place.path,
                    "data-first": str(place.first),
                    "data-last": str(place.last),
                }
                return True
        elif re.match(r"[a-z]+:|#", href):
            return True
        elif match := re.fullmatch(r"(?:\./)?(\d[\w-]*)\.md(#.*)?", href):
            token.attrs["href"] = f"{match[1]}.html{match[2] or ''}"
            return True
        token.tag, token.attrs = "span", {"title": href}
        return False

    def _copied(self, src: str) -> str:
        """Copy an image beside the pages."""
        file = (self.walkthrough.file.parent / src).resolve()
        if re.match(r"[a-z]+:", src) or not file.is_file():
            return src
        shutil.copy(file, self.out / file.name)
        return file.name

    def _files(self) -> str:
        pages = self.document.pages
        stops = [(n, place) for n, page in enumerate(pages) if (place := self._place(page.stop))]
        # The widest first, so that a line leads to the narrowest stop around it.
        stops.sort(key=lambda item: item[1].first - item[1].last)
        paths = sorted({p.path for p in self.walkthrough.ranges.values() if p.path.endswith(".py")})
        texts = []
        for path in paths:
            told = {
                line: number
                for number, place in stops
                if place.path == path
                for line in range(place.first, place.last + 1)
            }
            rows = []
            for n, line in enumerate(_lines(self.walkthrough.project.file(path).text), 1):
                target = f"{_file_id(path)}-L{n}"
                page = f' data-page="{told[n]}"' if n in told else ""
                rows.append(
                    f'<span class="line{" told" if page else ""}" id="{target}">'
                    f'<a class="num" tabindex="-1" href="#{target}"{page}>{n}</a>{line}\n</span>'
                )
            texts.append(f'<pre class="code" data-file="{path}" hidden>{"".join(rows)}</pre>')
        return "".join(texts)


def _data(place: Range) -> str:
    return f'data-file="{place.path}" data-first="{place.first}" data-last="{place.last}"'


def _file_id(path: str) -> str:
    return re.sub(r"\W", "-", path)


def _lines(source: str) -> list[str]:
    """Highlighted lines, each with balanced tags."""
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    return highlight(source, lexer, HtmlFormatter(nowrap=True)).split("\n")[
        : len(source.splitlines())
    ]


def _highlight_fence(text: str, language: str, attrs: str) -> str:
    try:
        lexer = get_lexer_by_name(language or "text")
    except ClassNotFound:
        return ""
    inside = highlight(text, lexer, HtmlFormatter(nowrap=True))
    return f'<pre class="code"><code>{inside}</code></pre>'
