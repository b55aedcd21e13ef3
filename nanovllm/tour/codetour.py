"""Files for VS Code made from the walkthroughs: CodeTour tours and launch configurations.

What CodeTour wants (0.0.59): positions from 1; the comment box sits at `line`, so at the range's
end; `selection.end.character` is the line's length + 1; links from the workspace root, without
`#L...`; `~~~` fences; at most one hyphen in a title; no `ref`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.tour.anchors import Project

if TYPE_CHECKING:
    from nanovllm.tour.document import Page
    from nanovllm.tour.walkthrough import Walkthrough

Json = dict[str, Any]


def tour_title(walkthrough: Walkthrough) -> str:
    number = walkthrough.name.partition("-")[0]
    title = re.sub(r"^\d+[.:]? *", "", walkthrough.document.title).replace("`", "")
    return f"{number} - {title.replace(' - ', ': ').replace('-', ' ')}"


def make_tour(walkthrough: Walkthrough, is_primary: bool = False) -> Json:
    pages = walkthrough.document.pages
    step_of = {page.stop.label: n for n, page in enumerate(pages, 1) if page.stop}
    steps = [_step(walkthrough, page, step_of) for page in pages]
    tour: Json = {"title": tour_title(walkthrough), "steps": steps}
    if is_primary:
        tour["isPrimary"] = True
    return tour


def _step(walkthrough: Walkthrough, page: Page, step_of: dict[str, int]) -> Json:
    step: Json = {}
    if page.title:
        step["title"] = page.title.replace("`", "")
    text = page.prose
    place = walkthrough.ranges.get(page.stop.label) if page.stop else None
    if page.stop and place and place.first:
        end = len(walkthrough.project.file(place.path).lines[place.last - 1]) + 1
        step |= {
            "file": place.path,
            "line": place.last,
            "selection": {
                "start": {"line": place.first, "character": 1},
                "end": {"line": place.last, "character": end},
            },
        }
        if table := walkthrough.table(page.stop):
            text += "\n\n" + table.rstrip("\n")
    step["description"] = _description(walkthrough, text, step_of)
    return step


def _description(walkthrough: Walkthrough, text: str, step_of: dict[str, int]) -> str:
    """Prose as CodeTour renders it: links to stops become links to steps, links to code links from
    the workspace root, fences tildes."""

    def link(label: str, shown: str) -> str | None:
        if label in step_of:
            return f"[{shown}][#{step_of[label]}]"
        if label in walkthrough.ranges:
            return f"[{shown}](./{walkthrough.ranges[label].path})"
        return None

    text = walkthrough.document.replace_links(text, link)
    text = re.sub(r"\[([^\[\]]+)\]\(#[^)]*\)", r"\1", text)  # headings are no targets there
    text = re.sub(r"\]\((?!\.\.?/|#|[a-z]+:)([^)]+)\)", r"](./walkthroughs/\1)", text)
    text = re.sub(r"\]\(\.\./([^)#]*)(#L[^)]*)?\)", r"](./\1)", text)
    return re.sub(r"^( *)```", r"\1~~~", text, flags=re.M)


def make_launch(project: Project) -> Json:
    """One debug configuration for the command and one a scenario."""

    def configuration(name: str, **more: Any) -> Json:
        return {
            "name": name,
            "type": "debugpy",
            "request": "launch",
            **more,
            "cwd": "${workspaceFolder}",
            "console": "integratedTerminal",
            "justMyCode": True,
        }

    scenarios = sorted((project.walkthroughs / "scenarios").glob("[!_]*.py"))
    return {
        "version": "0.2.0",
        "configurations": [
            configuration(
                "nanovllm generate",
                module=project.package,
                args=["generate", "Once upon a time", "--max-tokens", "8"],
            ),
            *(
                configuration(
                    f"scenario {path.stem}",
                    program=f"${{workspaceFolder}}/walkthroughs/scenarios/{path.name}",
                    env={"PYTHONPATH": "${workspaceFolder}"},
                )
                for path in scenarios
                if "def main(" in path.read_text(encoding="utf-8")
            ),
        ],
    }


def generated_files(project: Project, walkthroughs: Sequence[Walkthrough]) -> dict[str, str]:
    """Path -> content of every file made from these walkthroughs."""

    def text(data: Json) -> str:
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    files = {
        f".tours/{w.name}.tour": text(make_tour(w, w.name.startswith("00"))) for w in walkthroughs
    }
    files[".vscode/launch.json"] = text(make_launch(project))
    return files
