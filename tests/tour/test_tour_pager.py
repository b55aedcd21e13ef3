"""`nanovllm tour`: pages, keys, and pdb at the stops."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from nanovllm.exceptions import VLLMValidationError
from nanovllm.tour.pager import Pager, next_index, record, run_tour

REPOSITORY = Path(__file__).resolve().parents[2]


def printed(toy) -> str:
    console = Console(file=io.StringIO(), width=90, no_color=True)
    run_tour(toy.project(), "01-till", console)
    return console.file.getvalue()


def test_without_a_terminal_everything_is_printed(toy):
    text = printed(toy)
    assert [f"{n}/6" in text for n in range(1, 7)] == [True] * 6
    assert "Customers come one by one, and Till.ring_up is called" in text
    assert "❱ 42             cost = price * 2" in text
    assert "  41         for price in basket.prices:" in text
    assert "self.total        6       76" in text
    assert "<!--" not in text


def test_a_page_says_how_far_the_reader_has_come(toy):
    pager = Pager(record(toy.project(), "01-till"))
    console = Console(file=io.StringIO(), width=90, no_color=True)
    console.print(pager.render(2))
    assert "01-till  3/6  ███░░░" in console.file.getvalue()


def test_what_is_out_of_date_is_said_first(toy):
    toy.replace(toy.walkthrough, "expect: cost == 20", "expect: cost == 21")
    assert printed(toy).startswith("out of date: walkthroughs/01-till.md:")


def test_a_walkthrough_that_cannot_run_is_one_sentence(toy):
    toy.replace(toy.scenario, "limit=100", "limit=1")
    with pytest.raises(VLLMValidationError, match="scenario 'till' fails: ValueError: too much"):
        printed(toy)


@pytest.mark.parametrize(
    ("answer", "index", "leads_to"),
    [
        ("", 0, 1), ("n", 0, 1), ("next", 4, 5), ("", 5, None), ("b", 3, 2), ("b", 0, 0),
        ("4", 0, 3), ("99", 0, 5), ("0", 3, 0), ("q", 2, None), ("what", 2, 2),
    ],
)  # fmt: skip
def test_keys(answer, index, leads_to):
    assert next_index(answer, index, 6) == leads_to


LIVE = """
import sys
from pathlib import Path
from nanovllm.tour.anchors import Project
from nanovllm.tour.pager import run_live
run_live(Project(Path(sys.argv[1]), "toyshop"), "01-till")
"""


def live(toy, commands: list[str]) -> list[str]:
    """The lines at which pdb prompted, and what it printed at prompts."""
    done = subprocess.run(
        [sys.executable, "-c", LIVE, str(toy.root)],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "90"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("(Pdb) ") for line in done.stdout.splitlines()]
    return [n for n in lines if n.startswith(("-> ", "= ", "The scenario"))]


def test_live_opens_pdb_at_the_line_about_to_run_in_the_pass_that_is_told(toy):
    assert live(toy, ["c", "!print('=', price, basket.name)", "c", "c", "c"]) == [
        "-> for basket in baskets:",
        "-> cost = price * 2",
        "= 10 b",
        "-> self.total += subtotal",
        "-> return net * (100 + VAT_PERCENT) / 100",
        "The scenario has ended.",
    ]


def test_live_steps_on_with_pdb_and_finds_the_next_stop_again(toy):
    assert live(toy, ["n", "n", "n", "c", "n", "c", "c", "c"]) == [
        "-> for basket in baskets:",
        "-> result = self.ring_up(basket)",
        "-> results.append(result)",
        "-> for basket in baskets:",
        "-> cost = price * 2",
        "-> subtotal += cost",
        "-> self.total += subtotal",
        "-> return net * (100 + VAT_PERCENT) / 100",
        "The scenario has ended.",
    ]


def test_live_can_be_quit(toy):
    assert live(toy, ["q"]) == ["-> for basket in baskets:"]
