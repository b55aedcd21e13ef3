"""What VS Code reads: tours by CodeTour's rules, and launch configurations."""

from __future__ import annotations

import json

import pytest

from nanovllm.tour.codetour import make_tour, tour_title
from nanovllm.tour.walkthrough import Walkthrough

jsonschema = pytest.importorskip("jsonschema")

POSITION = {
    "type": "object",
    "required": ["line", "character"],
    "properties": {
        "line": {"type": "integer", "minimum": 1},
        "character": {"type": "integer", "minimum": 1},
    },
    "additionalProperties": False,
}
# The part of CodeTour's format that a tour of files and prose uses, in our words.
TOUR = {
    "type": "object",
    "required": ["title", "steps"],
    "properties": {
        "title": {"type": "string", "pattern": "^[^-]+(-[^-]+)?$"},
        "description": {"type": "string"},
        "isPrimary": {"type": "boolean"},
        "nextTour": {"type": "string"},
        "steps": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["description"],
                "properties": {
                    "title": {"type": "string"},
                    "description": {"type": "string", "minLength": 1},
                    "file": {"type": "string", "pattern": r"^[^./\\]"},
                    "line": {"type": "integer", "minimum": 1},
                    "selection": {
                        "type": "object",
                        "required": ["start", "end"],
                        "properties": {"start": POSITION, "end": POSITION},
                        "additionalProperties": False,
                    },
                },
                "dependentRequired": {"file": ["line"], "line": ["file"], "selection": ["file"]},
                "additionalProperties": False,
            },
        },
    },
    "additionalProperties": False,  # `ref` above all
}


def test_the_tour_keeps_to_the_format(toy):
    tour = json.loads((toy.root / ".tours" / "01-till.tour").read_text())
    jsonschema.validate(tour, TOUR)
    for step in tour["steps"]:
        if "file" in step:
            lines = (toy.root / step["file"]).read_text().splitlines()
            end = step["selection"]["end"]
            assert step["line"] == end["line"], "the comment box sits at the range's end"
            assert end["character"] == len(lines[end["line"] - 1]) + 1
        description = step["description"]
        assert "```" not in description
        assert "<!--" not in description
        assert "#L" not in description
        assert "](../" not in description


def test_links_lead_to_steps_or_from_the_workspace_root(toy):
    tour = make_tour(Walkthrough(toy.project(), "01-till"))
    serving = next(step for step in tour["steps"] if step.get("title") == "Serving")
    assert "[Customers][#3]" in serving["description"]
    assert "[the loop](./toyshop/till.py)" in serving["description"]
    assert "[`Till.ring_up`](./toyshop/till.py)" in serving["description"]
    assert "~~~python\ntill.serve([...])  # [not a link][nowhere]" in serving["description"]
    assert "![a till](./walkthroughs/till.svg)" in tour["steps"][0]["description"]


def test_a_title_has_one_hyphen(toy):
    toy.replace(toy.walkthrough, "# 1. The till", "# 1. The two-sided till - and `more`")
    assert tour_title(Walkthrough(toy.project(), "01-till")) == "01 - The two sided till: and more"


def test_launch_configurations_run_the_command_and_each_scenario(toy):
    launch = json.loads((toy.root / ".vscode" / "launch.json").read_text())
    assert launch["version"] == "0.2.0"
    programs = [c.get("program") for c in launch["configurations"]]
    assert programs == [None, "${workspaceFolder}/walkthroughs/scenarios/till.py"]
    assert {(c["type"], c["request"]) for c in launch["configurations"]} == {("debugpy", "launch")}
