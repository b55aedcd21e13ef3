"""The toy walkthrough, whole and up to date, in a folder of its own that a test may damage."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm.tour import check
from nanovllm.tour.anchors import Project

DATA = Path(__file__).parent / "data"
NAME = "01-till"


class Toy:
    """A project of a package, a scenario and a walkthrough."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.walkthrough = root / "walkthroughs" / f"{NAME}.md"
        self.code = root / "toyshop" / "till.py"
        self.scenario = root / "walkthroughs" / "scenarios" / "till.py"

    def project(self) -> Project:
        """As a new process would see it."""
        for name in [n for n in sys.modules if n.partition(".")[0] == "toyshop"]:
            del sys.modules[name]
        return Project(self.root, "toyshop")

    def fix(self) -> list[str]:
        return check.fix(self.project())[0]

    def problems(self) -> list[str]:
        return [str(problem) for problem in check.check(self.project()).problems]

    def replace(self, file: Path, old: str, new: str) -> None:
        text = file.read_text()
        assert text.count(old) == 1, f"{old!r} is in {file} {text.count(old)} times"
        file.write_text(text.replace(old, new))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    # A file changed within a second may keep its size, and its stale bytecode would be loaded.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    root = tmp_path / "toy"
    shutil.copytree(DATA, root, ignore=shutil.ignore_patterns("__pycache__"))
    toy = Toy(root.resolve())
    toy.fix()
    yield toy
    toy.project()
