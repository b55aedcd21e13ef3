"""Each kind of damage to a walkthrough or its code is reported, by the right message."""

from __future__ import annotations

import re

import pytest

from nanovllm.exceptions import VLLMValidationError
from nanovllm.tour import check
from nanovllm.tour.walkthrough import Walkthrough, find_name


def only(problems: list[str], *parts: str) -> str:
    """The one problem there is, which holds all `parts`."""
    assert len(problems) == 1, problems
    for part in parts:
        assert part in problems[0]
    return problems[0]


def some(problems: list[str], *parts: str) -> None:
    assert any(all(part in p for part in parts) for p in problems), problems


def test_a_fixed_walkthrough_has_no_problems_and_fixing_again_writes_nothing(toy):
    assert toy.problems() == []
    assert toy.fix() == []


def test_all_running_stops_ran_and_what_did_not_run_in_them_is_listed(toy):
    toy.replace(toy.walkthrough, "from: self.total += subtotal", "order: any\nfrom: for price in")
    toy.fix()
    report = check.check(toy.project())
    assert report.problems == []
    assert "stops: 4 of 4 ran, 1 static" in report.walkthroughs[0].summary()
    assert "did not run: [till/end] L45" in report.walkthroughs[0].summary()


def test_moved_code_is_a_matter_of_position_which_fix_mends(toy):
    toy.code.write_text("# a new first line\n" + toy.code.read_text())
    problems = toy.problems()
    some(
        problems,
        "[till/body] moved from toyshop/till.py#L42-L43 to toyshop/till.py#L43-L44",
        "run `nanovllm walkthrough fix`",
    )
    assert not any("changed" in p for p in problems)
    some(problems, ".tours/01-till.tour:1: is stale")
    toy.fix()
    assert toy.problems() == []


def test_changed_code_shows_its_diff_and_waits_for_accept(toy):
    toy.replace(toy.code, "cost = price * 2", "cost = price + price")
    toy.fix()
    problems = toy.problems()
    some(problems, "[till/body] changed", "-cost = price * 2\n", "+cost = price + price\n",
         "nanovllm walkthrough accept 01-till 'till/body'")  # fmt: skip
    some(problems, "[till/loop] changed")
    assert not any("[till/end]" in p for p in problems)
    accepted = check.accept(toy.project(), "01-till", ["till/body"])
    assert len(accepted) == 1 and accepted[0].startswith("[till/body]")
    assert not any("[till/body]" in p for p in toy.problems())
    check.accept(toy.project(), "01-till")
    assert toy.problems() == []


def test_comments_and_blank_lines_are_no_content(toy):
    toy.replace(toy.code, "            cost = price * 2\n",
                "            cost = price * 2  # twice\n\n            # now add\n")  # fmt: skip
    toy.fix()
    assert toy.problems() == []


def test_docstrings_are_content(toy):
    toy.replace(toy.code, '"""Add a basket to the total."""', '"""Add it to the total."""')
    only(toy.problems(), "[`Till.ring_up`] changed")


def test_a_class_that_is_only_linked_to_is_compared_without_the_bodies_of_its_methods(toy):
    toy.replace(toy.code, "        results = []\n", "        results = list()\n")
    assert not any("[`Till`]" in p for p in toy.problems())
    toy.replace(
        toy.code, "def serve(self, baskets: list[Basket])", "def serve(self, baskets: list)"
    )
    some(toy.problems(), "[`Till`] changed")


def test_a_renamed_symbol_is_named_with_what_came_near(toy):
    toy.code.write_text(toy.code.read_text().replace("ring_up", "ring_it_up"))
    problems = toy.problems()
    some(problems, "[till/body]: no symbol `Till.ring_up`; near: toyshop/till.py::Till.ring_it_up")
    assert toy.fix() == [], "an unresolved walkthrough is left alone"


def test_ambiguous_text_is_an_error_that_names_the_lines(toy):
    toy.replace(toy.walkthrough, "from: cost = price", "from: cost")
    only(
        toy.problems(),
        "[till/body]: from: 'cost' is in 2 lines of `toyshop/till.py::Till.ring_up`: "
        "line 42 `cost = price * 2`, line 43 `subtotal += cost`",
    )


def test_text_that_is_gone_is_an_error_that_names_near_lines(toy):
    toy.replace(toy.code, "cost = price * 2", "cost = 2 * price")
    some(toy.problems(), "[till/body]: from: no line of", "near: line 42 `cost = 2 * price`")


def test_an_ambiguous_symbol_is_an_error_that_names_the_places(toy):
    (toy.root / "toyshop" / "other.py").write_text("class Till:\n    pass\n")
    some(toy.problems(), "[`Till`]: `Till` names 2 symbols: toyshop/other.py::Till (line 1), "
         "toyshop/till.py::Till (line 25)")  # fmt: skip


def test_a_wrong_claim_says_what_is_so(toy):
    toy.replace(toy.walkthrough, "expect: cost == 20", "expect: cost == 21")
    some(toy.problems(), "[till/body] expect: `cost == 21` is false: cost is 20")


def test_a_wrong_claim_about_a_constant_says_what_is_so(toy):
    toy.replace(toy.walkthrough, "expect: VAT_PERCENT == 20", "expect: VAT_PERCENT < 19")
    some(toy.problems(), "[till/vat] expect: `VAT_PERCENT < 19` is false: VAT_PERCENT is 20")


def test_a_claim_that_cannot_be_evaluated_says_why(toy):
    toy.replace(toy.walkthrough, "expect: cost == 20", "expect: costs == 20")
    some(toy.problems(), "[till/body] expect: `costs == 20` fails: NameError")


def test_a_range_that_never_runs_names_the_nearest_line_reached(toy):
    toy.replace(toy.walkthrough, "from: cost = price\nto: subtotal += cost",
                'from: raise ValueError("too much")')  # fmt: skip
    some(
        toy.problems(),
        '[till/body] never runs its first line: L45 `raise ValueError("too much")`; '
        "the nearest line reached is L44 `if subtotal > self.limit:`",
    )


def test_a_range_whose_last_line_never_runs_is_reported(toy):
    toy.replace(toy.walkthrough, "to: subtotal += cost", 'to: raise ValueError("too much")')
    some(toy.problems(), "[till/body] never runs its last line: L45")


def test_a_function_that_is_never_called_is_reported(toy):
    toy.replace(toy.scenario, "        with_vat(subtotal)", "        print(subtotal)")
    some(toy.problems(), "[with_vat] never runs: `with_vat` is not called in scenario 'till'")


def test_a_when_that_never_holds_says_what_it_saw(toy):
    toy.replace(
        toy.walkthrough,
        'when: basket.name == "b"\nexpect: cost',
        'when: basket.name == "c"\nexpect: cost',
    )
    some(toy.problems(), "[till/body] when: `basket.name == \"c\"` holds in none of 5 passes "
         "(basket.name is 'a'; basket.name is 'b')")  # fmt: skip


def test_stops_that_run_in_another_order_than_the_text_are_reported(toy):
    text = toy.walkthrough.read_text()
    late = re.search(r"<!-- stop with_vat.*?-->\n", text, re.DOTALL)[0]
    text = text.replace(late, "")
    moved = late + "[Gross][with_vat] comes first.\n\n"
    toy.walkthrough.write_text(text.replace("## Serving", moved + "## Serving"))
    toy.fix()
    some(toy.problems(), "[till/serve] runs before [with_vat] only")
    toy.replace(toy.walkthrough, "stop with_vat\n", "stop with_vat\norder: any\n")
    toy.fix()
    assert not any("runs before" in p for p in toy.problems())


def test_a_stale_table_shows_what_differs(toy):
    toy.replace(toy.walkthrough, "| `self.total` | `6` | `76` |", "| `self.total` | `6` | `75` |")
    only(toy.problems(), "[till/end] its table of values is stale",
         "-| `self.total` | `6` | `75` |", "+| `self.total` | `6` | `76` |")  # fmt: skip
    toy.fix()
    assert toy.problems() == []


def test_floats_in_tables_have_a_tolerance(toy):
    table, tour = "`returned` | `7.2` |", toy.root / ".tours" / "01-till.tour"
    for file in (toy.walkthrough, tour):
        toy.replace(file, table, table.replace("7.2", "7.21"))
    assert toy.problems() == []
    assert toy.fix() == []
    toy.replace(toy.walkthrough, table.replace("7.2", "7.21"), table.replace("7.2", "7.4"))
    some(toy.problems(), "[with_vat] its table of values is stale")


def test_a_stale_tour_and_a_stale_launch_file_are_reported(toy):
    tour = toy.root / ".tours" / "01-till.tour"
    tour.write_text(tour.read_text().replace('"line": 54', '"line": 53'))
    (toy.root / ".vscode" / "launch.json").unlink()
    (toy.root / ".tours" / "07-gone.tour").write_text("{}")
    problems = toy.problems()
    some(problems, ".tours/01-till.tour:1: is stale; run `nanovllm walkthrough fix`")
    some(problems, ".vscode/launch.json:1: is missing")
    some(problems, ".tours/07-gone.tour:1: is of no walkthrough")
    toy.fix()
    assert toy.problems() == []


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("[x](gone.md)", "dead link: gone.md"),
        ("![x](gone.png)", "dead image: gone.png"),
        ("[x](01-till.md#no-heading)", "dead link: 01-till.md#no-heading (no such #no-heading)"),
        ("[x](till.svg#L1-L99)", "dead link: till.svg#L1-L99"),
        ("[x](../toyshop/till.py#L3)", "will go stale: name the code by an anchor"),
        ("[x][till/nowhere]", "[till/nowhere] is no label of this walkthrough (labels: till/loop"),
        ("[`Nothing`]", "[`Nothing`]: no symbol `Nothing`"),
    ],
)
def test_dead_links_are_reported(toy, link, message):
    toy.replace(toy.walkthrough, "and [`Basket`] is", f"and {link}, [`Basket`] is")
    only(toy.problems(), message)


def test_brackets_in_code_are_no_links(toy):
    toy.replace(toy.walkthrough, "and [`Basket`] is",
                "`a` [`Basket`], `x[0][till]`, `b` and\n`c[1]\n[2][3]`")  # fmt: skip
    toy.fix()
    assert toy.problems() == []


def test_dead_links_of_the_readme_are_reported(toy):
    (toy.root / "README.md").write_text("[x](walkthroughs/01-till.md) [y](walkthroughs/02.md)\n")
    only(toy.problems(), "README.md:1: dead link: walkthroughs/02.md")


def test_numerals_that_nothing_covers_are_listed(toy):
    toy.replace(toy.walkthrough, "10 for the last.", "10 for the last, 99 never, `x == 98` nor.")
    only(toy.problems(), "covers the numerals 99 98", "<!-- not-run: 99 98 -->")
    toy.replace(toy.walkthrough, "<!-- not-run: 24 -->", "<!-- not-run: 24 99 98 -->")
    toy.fix()
    assert toy.problems() == []


def test_a_numeral_must_be_shown_by_the_end_of_its_section(toy):
    toy.replace(toy.walkthrough, "How [`Till`] adds", "To 70: how [`Till`] adds")
    only(toy.problems(), "covers the numerals 70")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("show: price, cost, subtotal", "show: price cost", "show: 'price cost' is not Python"),
        ("expect: cost == 20", "expect: cost = 20", "`cost = 20` is not a Python expression"),
        ("rows: 3", "rows: many", "rows: 'many' is not a number"),
        ("stop till/end", "stop till/body", "label `till/body` is given twice"),
        ("stop till/end", "stop: till/end", "`stop: till/end` is no directive"),
        ("anchor till/loop\n", "anchor till/loop\nshow: x\n", "`show:` belongs to a stop"),
    ],
)
def test_a_directive_that_is_wrong_is_reported(toy, old, new, message):
    toy.replace(toy.walkthrough, old, new)
    some(toy.problems(), message)


def test_a_scenario_that_fails_is_reported(toy):
    toy.replace(toy.scenario, "limit=100", "limit=10")
    only(toy.problems(), "scenario 'till' fails: ValueError: too much (till.py:45)")


def test_a_scenario_that_is_missing_is_reported(toy):
    toy.scenario.unlink()
    some(toy.problems(), "scenario 'till' has no file till.py")


def test_code_that_runs_needs_a_scenario(toy):
    toy.replace(toy.walkthrough, "<!-- scenario: till -->\n", "")
    only(toy.problems(), "[till/serve] is code that runs, but no `<!-- scenario: NAME -->`")


def test_public_symbols_that_no_walkthrough_names_are_listed(toy):
    toy.code.write_text(toy.code.read_text() + "\n\ndef refund():\n    pass\n")
    project = toy.project()
    unnamed = check.uncited(project, [Walkthrough(project, "01-till")])
    assert unnamed == ["toyshop/till.py::noted", "toyshop/till.py::refund"]


def test_a_walkthrough_is_found_by_number_or_name(toy):
    project = toy.project()
    assert {find_name(project, n) for n in ("01", "till", "01-till", "x/01-till.md")} == {"01-till"}
    with pytest.raises(VLLMValidationError, match="there are: 01-till"):
        find_name(project, "tall")
