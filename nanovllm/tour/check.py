"""`nanovllm walkthrough check`, `fix` and `accept`.

`check` computes everything the tool owns (footers, tables, tours) and compares; `fix` writes it.
What only a reader can judge (code whose text changed, a claim that is false) `fix` leaves alone.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanovllm.tour.anchors import Project
from nanovllm.tour.codetour import generated_files
from nanovllm.tour.document import (
    VALUES,
    Link,
    footer_text,
    links_in,
    make_markdown,
    read_footer,
)
from nanovllm.tour.walkthrough import Problem, Walkthrough, find_names


@dataclass
class Report:
    walkthroughs: list[Walkthrough]
    problems: list[Problem]


def load(project: Project, names: Sequence[str], run: bool = True) -> list[Walkthrough]:
    walkthroughs = [Walkthrough(project, name) for name in names]
    for walkthrough in walkthroughs:
        if run:
            walkthrough.record()
    return walkthroughs


def check(project: Project, names: Sequence[str] = (), run: bool = True) -> Report:
    """Look at the walkthroughs named, or at all, and at what is generated from them.

    Args:
        run: run the scenarios. Without it claims, tables and tours are not looked at.
    """
    walkthroughs = load(project, names or find_names(project), run)
    problems = []
    for walkthrough in walkthroughs:
        walkthrough.problems += _check_anchors(walkthrough)
        walkthrough.problems += _check_links(
            project, walkthrough.file, walkthrough.document.links, is_walkthrough=True
        )
        if run:
            walkthrough.problems += _check_tables(walkthrough)
            walkthrough.problems += _check_numerals(walkthrough)
        problems += sorted(walkthrough.problems, key=lambda p: p.line)
    for readme in (project.root / "README.md", project.walkthroughs / "README.md"):
        if readme.is_file() and not names:
            tokens = make_markdown().parse(readme.read_text(encoding="utf-8"))
            problems += _check_links(project, readme, list(links_in(tokens, 0)), False)
    if run:
        problems += _check_generated(project, walkthroughs, everything=not names)
    return Report(walkthroughs, problems)


def _check_anchors(walkthrough: Walkthrough) -> Iterator[Problem]:
    footer = read_footer(walkthrough.document.footer)
    accepted = walkthrough.accepted()
    for label, place in walkthrough.ranges.items():
        line = walkthrough.line_of(label)
        known = accepted.get(label)
        anchor = walkthrough.document.anchor_of(label)
        if label not in footer or known is None or known["anchor"] != anchor.spec():
            yield _fixable(walkthrough, line, f"[{label}] is new or has another anchor")
            continue
        if footer[label] != f"../{place.link()}":
            was = footer[label].removeprefix("../")
            yield _fixable(walkthrough, line, f"[{label}] moved from {was} to {place.link()}")
        text = walkthrough.project.content(place)
        if text != known["text"]:
            diff = "\n    ".join(_diff(known["text"], text))
            yield Problem(
                walkthrough.path,
                line,
                f"[{label}] changed ({place.link()}): read again what is said about it, then "
                f"`nanovllm walkthrough accept {walkthrough.name} '{label}'`\n    {diff}",
            )
    for label in footer.keys() - set(walkthrough.document.labels):
        yield _fixable(walkthrough, 1, f"the footer has [{label}], which is not used")


def _fixable(walkthrough: Walkthrough, line: int, message: str) -> Problem:
    message = f"{message}; run `nanovllm walkthrough fix`"
    return Problem(walkthrough.path, line, message, fixable=True)


def _diff(old: list[str], new: list[str]) -> list[str]:
    return list(difflib.unified_diff(old, new, "accepted", "now", lineterm="", n=2))


def _check_tables(walkthrough: Walkthrough) -> Iterator[Problem]:
    document = walkthrough.document
    found = dict(document.tables)
    for stop in document.stops:
        table, old = walkthrough.table(stop), found.pop(stop.label, "")
        if stop.label in walkthrough.seen and old != table:
            rows = _diff(old.splitlines(), table.splitlines())[3:]
            message = f"[{stop.label}] its table of values is stale\n    " + "\n    ".join(rows)
            yield _fixable(walkthrough, stop.line, message + "\n   ")
    for label in found:
        yield _fixable(walkthrough, 1, f"a table of values is of [{label}], which is no stop")


def _check_numerals(walkthrough: Walkthrough) -> Iterator[Problem]:
    stops = walkthrough.document.stops
    if any(stop.label not in walkthrough.seen for stop in stops):
        return  # What covers a numeral is not known before all stops are mended.
    tables = {stop.label: walkthrough.table(stop) for stop in stops}
    by_line: dict[int, list[str]] = {}
    for line, numeral in walkthrough.document.uncovered_numerals(tables):
        by_line.setdefault(line, []).append(numeral)
    for line, numerals in by_line.items():
        yield Problem(
            walkthrough.path,
            line,
            f"no expect, table or link covers the numerals {' '.join(numerals)}; if they are not "
            f"about the run: <!-- not-run: {' '.join(dict.fromkeys(numerals))} -->",
        )


def _check_links(
    project: Project, file: Path, links: Sequence[Link], is_walkthrough: bool
) -> Iterator[Problem]:
    path = file.relative_to(project.root).as_posix()
    for link in links:
        if re.match(r"[a-z]+:", link.href):
            continue  # To code, which _check_anchors sees; or to the network, which is not asked.
        target, _, fragment = link.href.partition("#")
        target_file = (file.parent / target).resolve() if target else file
        kind = "image" if link.is_image else "link"
        if not target_file.exists():
            yield Problem(path, link.line, f"dead {kind}: {link.href}")
        elif is_walkthrough and target.endswith(".py") and fragment:
            message = f"{link.href} will go stale: name the code by an anchor"
            yield Problem(path, link.line, message)
        elif fragment and not _has_fragment(target_file, fragment):
            yield Problem(path, link.line, f"dead {kind}: {link.href} (no such #{fragment})")


def _has_fragment(file: Path, fragment: str) -> bool:
    if not file.is_file():
        return False
    text = file.read_text(encoding="utf-8")
    if match := re.fullmatch(r"L(\d+)(?:-L(\d+))?", fragment):
        first, last = int(match[1]), int(match[2] or match[1])
        return 1 <= first <= last <= len(text.splitlines())
    headings = re.findall(r"^#{1,6} +(.+?)\s*$", text, re.M)
    return fragment in {slug(heading) for heading in headings}


def slug(heading: str) -> str:
    """A heading's id on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _check_generated(
    project: Project, walkthroughs: Sequence[Walkthrough], everything: bool
) -> Iterator[Problem]:
    # A walkthrough that is broken is mended first: its tour would only repeat what is wrong.
    sound = [w for w in walkthroughs if all(p.fixable for p in w.problems)]
    broken = {f".tours/{w.name}.tour" for w in walkthroughs if w not in sound}
    wanted = generated_files(project, sound)
    for path, content in wanted.items():
        file = project.root / path
        old = file.read_bytes() if file.is_file() else None
        if old != content.encode():
            state = "is missing" if old is None else "is stale"
            yield Problem(path, 1, f"{state}; run `nanovllm walkthrough fix`", fixable=True)
    if everything:
        for tour in sorted(project.root.glob(".tours/*.tour")):
            path = tour.relative_to(project.root).as_posix()
            if path not in wanted and path not in broken:
                message = "is of no walkthrough; run `nanovllm walkthrough fix`"
                yield Problem(path, 1, message, fixable=True)


# ---- writing -------------------------------------------------------------------------------------


def fixed_text(walkthrough: Walkthrough) -> str:
    """The walkthrough with its footer and its tables of values up to date."""
    document = walkthrough.document
    body = document.body
    stops = {stop.label: stop for stop in document.stops}

    def renew(match: re.Match[str]) -> str:
        label = match["label"]
        if label not in stops:
            return ""
        if label not in walkthrough.seen:
            return match[0]
        new = walkthrough.table(stops[label])
        if not new:
            return ""
        return _block(label, new)

    placed = document.tables
    # New tables go under their page's prose. From the end, so that earlier lines stay where they
    # are.
    lines = body.splitlines(keepends=True)
    pages = document.pages
    ends = [page.line - 1 for page in pages[1:]] + [len(lines)]
    for page, end in reversed(list(zip(pages, ends, strict=True))):
        if page.stop and page.stop.label not in placed and walkthrough.table(page.stop):
            last = max(n for n in range(end) if lines[n].strip())
            block = _block(page.stop.label, walkthrough.table(page.stop))
            lines[last] = lines[last].rstrip("\n") + f"\n\n{block}\n"
    body = VALUES.sub(renew, "".join(lines))
    body = body.rstrip("\n") + "\n"
    return f"{body}\n{footer_text(walkthrough.ranges)}" if walkthrough.ranges else body


def _block(label: str, table: str) -> str:
    return f"<!-- values {label} -->\n{table}<!-- /values -->"


def fix(project: Project, names: Sequence[str] = ()) -> tuple[list[str], list[Problem]]:
    """Write what the tool owns. Text of code that changed stays unaccepted; a walkthrough with an
    anchor that cannot be resolved is left alone.

    Returns:
        The files written or removed, and what the author has to mend.
    """
    written: list[str] = []
    names = names or find_names(project)
    walkthroughs = load(project, names)
    for walkthrough in walkthroughs:
        if not walkthrough.resolved:
            continue
        document = walkthrough.document
        _write(project, walkthrough.path, fixed_text(walkthrough), written)
        old = walkthrough.accepted()
        new = {}
        for label, place in walkthrough.ranges.items():
            anchor = document.anchor_of(label).spec()
            known = old.get(label)
            if known is None or known["anchor"] != anchor:
                known = {"anchor": anchor, "text": project.content(place)}
            new[label] = known
        _write_accepted(walkthrough, new, written)
    # Pages and lines have to be those of the files as they are now.
    again = [Walkthrough(project, w.name) for w in walkthroughs if w.resolved]
    for fresh in again:
        fresh.seen = next(w.seen for w in walkthroughs if w.name == fresh.name)
    wanted = generated_files(project, again)
    for path, content in wanted.items():
        _write(project, path, content, written)
    if list(names) == find_names(project):
        wanted |= {f".tours/{name}.tour": "" for name in names}
        for tour in sorted(project.root.glob(".tours/*.tour")):
            path = tour.relative_to(project.root).as_posix()
            if path not in wanted:
                tour.unlink()
                written.append(path)
    return written, [problem for w in walkthroughs for problem in w.problems]


def accept(project: Project, name: str, labels: Sequence[str] = ()) -> list[str]:
    """Note that the prose about changed code was read again.

    Returns:
        The labels whose text was accepted, each with its diff.
    """
    walkthrough = Walkthrough(project, name)
    accepted = walkthrough.accepted()
    done = []
    for label, place in walkthrough.ranges.items():
        text = project.content(place)
        known = accepted.get(label)
        if (labels and label not in labels) or known is None or known["text"] == text:
            continue
        done.append("\n    ".join([f"[{label}]", *_diff(known["text"], text)]))
        accepted[label] = {"anchor": walkthrough.document.anchor_of(label).spec(), "text": text}
    _write_accepted(walkthrough, accepted, [])
    return done


def _write_accepted(
    walkthrough: Walkthrough, accepted: dict[str, dict[str, list[str]]], written: list[str]
) -> None:
    path = walkthrough.accepted_file.relative_to(walkthrough.project.root).as_posix()
    content = json.dumps(dict(sorted(accepted.items())), indent=1, ensure_ascii=False) + "\n"
    _write(walkthrough.project, path, content, written)


def _write(project: Project, path: str, content: str, written: list[str]) -> None:
    file = project.root / path
    if file.is_file() and file.read_bytes() == content.encode():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode())
    written.append(path)


def uncited(project: Project, walkthroughs: Sequence[Walkthrough]) -> list[str]:
    """Public classes and functions of the package that no walkthrough names or stops in."""
    cited = [r for w in walkthroughs for r in w.ranges.values() if r.first]
    found = []
    for symbol in project.package_symbols:
        source = project.file(symbol.path)
        node = source.statement_at(symbol.first)
        named = symbol.qualname and "." not in symbol.qualname and symbol.qualname[0] != "_"
        if not named or type(node).__name__ not in ("ClassDef", "FunctionDef"):
            continue
        if not any(
            place.path == symbol.path and place.first <= symbol.last and symbol.first <= place.last
            for place in cited
        ):
            found.append(str(symbol))
    return found
