"""Apply each mutant to a copy of the package and run the spec that must kill it."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
NUM_PARALLEL = 2
TIMEOUT = 240  # seconds for one spec


@dataclass
class Result:
    mutant: Mutant
    killed: bool
    by: str  # the rule or invariant whose assertion failed, or what happened instead
    seconds: float


def mutate(source: str, mutant: Mutant) -> str:
    """The source with the mutant's text put in.

    Raises:
        ValueError: the old text is not there exactly once, or not inside the symbol.
    """
    count = source.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.name}: the old text occurs {count} times in {mutant.file}")
    line = source[: source.index(mutant.old)].count("\n") + 1
    if not any(first <= line <= last for first, last in spans(source, mutant.symbol)):
        raise ValueError(f"{mutant.name}: the old text is not in {mutant.symbol}")
    return source.replace(mutant.old, mutant.new)


def misfit(mutant: Mutant) -> str | None:
    """Why the mutant cannot be applied; None if it can."""
    try:
        mutate((ROOT / mutant.file).read_text(encoding="utf-8"), mutant)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def spans(source: str, symbol: str) -> list[tuple[int, int]]:
    """First and last line of every definition of `symbol` (a function, Class or Class.method)."""
    found: list[tuple[int, int]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                name = prefix + child.name
                if name == symbol:
                    found.append((child.lineno, child.end_lineno or child.lineno))
                visit(child, name + ".")

    visit(ast.parse(source), "")
    return found


def copy_repository(target: Path) -> None:
    """What a spec needs of the repository; the model's weights are linked, not copied."""
    skip = shutil.ignore_patterns("__pycache__", "assets", "golden")
    for name in ("nanovllm", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", target)
    if (ROOT / "nanovllm" / "assets").exists():
        (target / "nanovllm" / "assets").symlink_to(ROOT / "nanovllm" / "assets")


def try_spec(node_id: str, mutant: Mutant | None) -> tuple[str, str]:
    """Run a spec against a (mutated) copy. Returns (outcome, where)."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder).resolve()
        copy_repository(copy)
        if mutant is not None:
            path = copy / mutant.file
            path.write_text(mutate(path.read_text(encoding="utf-8"), mutant), encoding="utf-8")
        environment = os.environ | {
            "HYPOTHESIS_PROFILE": "mutants",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment.pop("PYTHONPATH", None)
        command = [sys.executable, "-m", "tests.mutants.run_spec", node_id]
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return "timed out", f"after {TIMEOUT} s"
        try:
            verdict = json.loads(done.stdout.splitlines()[-1])
        except (json.JSONDecodeError, IndexError):
            return "crashed", (done.stderr.splitlines() or ["no output"])[-1]
        return verdict["outcome"], verdict["where"]


def try_mutant(mutant: Mutant) -> Result:
    start = time.monotonic()
    outcome, where = try_spec(mutant.spec, mutant)
    killed = outcome == "own assertion"
    by = where if killed else f"{outcome} {where}".strip()
    return Result(mutant, killed, by, time.monotonic() - start)


def collect_specs() -> list[str]:
    """Node ids of everything in tests/spec."""
    command = [sys.executable, "-m", "pytest", "tests/spec", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def main(words: Sequence[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(w in m.description() for w in words)]
    wrong = [problem for mutant in chosen if (problem := misfit(mutant))]
    if wrong:
        print("\n".join(wrong))
        return 2
    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        results = list(pool.map(try_mutant, chosen))

    table = Table("mutant", "source", "spec", "killed", "by its assertion in", "s")
    for result in results:
        mutant = result.mutant
        spec = mutant.spec.removeprefix("tests/").replace("::runTest", "")
        killed = "yes" if result.killed else "[red]NO[/red]"
        table.add_row(mutant.name, mutant.source, spec, killed, result.by, f"{result.seconds:.0f}")
    console = Console(width=None if sys.stdout.isatty() else 180, highlight=False)
    console.print(table)

    num_killed = sum(result.killed for result in results)
    idle: list[str] = []
    if not words:
        useful = {result.mutant.spec for result in results if result.killed}
        idle = [spec for spec in collect_specs() if spec not in useful]
        for spec in idle:
            console.print(f"kills none: {spec}")
    print(f"{num_killed}/{len(results)} killed")
    return 0 if num_killed == len(results) and not idle else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
