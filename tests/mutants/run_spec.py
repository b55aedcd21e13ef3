"""Run one test, and say whether an assertion of its own failed.

    python -m tests.mutants.run_spec NODE_ID

Run it in the copy of the repository that is to be tried. The verdict is the last line, in JSON.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

ROOT = Path.cwd()


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in an exception group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in leaves(part)]
    return [error]


def is_own_assertion(error: BaseException, test_file: Path) -> bool:
    """Did an assert of the test's file, or of what it shares in tests/spec, fail?"""
    if not isinstance(error, AssertionError):
        return False
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    return raised_in == test_file or raised_in.parent == ROOT / "tests" / "spec"


class Verdict:
    """A pytest plugin that keeps what happened."""

    def __init__(self, test_file: Path) -> None:
        self.test_file = test_file
        self.result: dict[str, Any] = {"outcome": "not run", "where": ""}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        yield
        if call.when == "call" and call.excinfo is None and self.result["outcome"] == "not run":
            self.result["outcome"] = "passed"
        elif call.excinfo is not None:
            errors = leaves(call.excinfo.value)
            own = call.when == "call" and all(is_own_assertion(e, self.test_file) for e in errors)
            frame = traceback.extract_tb(errors[0].__traceback__)[-1]
            what = f"{type(errors[0]).__name__} in {frame.name}"
            self.result["outcome"] = "own assertion" if own else "crashed"
            self.result["where"] = frame.name if own else what


def main(node_id: str) -> None:
    verdict = Verdict((ROOT / node_id.split("::")[0]).resolve())
    pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", node_id], plugins=[verdict])
    import nanovllm

    assert Path(nanovllm.__file__).resolve().parent.parent == ROOT, "not the copy"
    print("\n" + json.dumps(verdict.result))


if __name__ == "__main__":
    main(sys.argv[1])
