"""How much code lies between LLM.generate and Sampler.forward?

    python scripts/core_path.py

Runs one prompt on the embedded model under a profiler and notes every function of nanovllm that is
called from LLM.generate on until Sampler.forward returns for the last time. Two counts a file: the
lines of the functions that ran, and of the whole file. Docstrings, comments and blank lines do not
count. The longest file of the package is named too.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from pathlib import Path
from types import FrameType
from typing import Any

from nanovllm import LLM, SamplingParams

PACKAGE = Path(__file__).parents[1] / "nanovllm"
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(path: Path) -> set[int]:
    """Numbers of the lines that hold code: not blank, a comment or part of a docstring."""
    source = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | Function)
            and node.body
            and isinstance(first := node.body[0], ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return lines


def function_lines(path: Path, first_lines: set[int]) -> set[int]:
    """Lines of the functions that begin (decorators included) at one of `first_lines`."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if start in first_lines:
                lines.update(range(start, (node.end_lineno or start) + 1))
    return lines


def functions_on_the_path() -> dict[Path, set[int]]:
    """File -> first lines of its functions called up to the last return of Sampler.forward."""
    llm = LLM(enforce_eager=True, num_gpu_blocks_override=64, max_model_len=256)
    called: set[tuple[str, int]] = set()
    on_path: set[tuple[str, int]] = set()

    def profile(frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            called.add((code.co_filename, code.co_firstlineno))
        elif event == "return" and code.co_qualname == "Sampler.forward":
            on_path.update(called)

    sys.setprofile(profile)
    try:
        llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=1.0, seed=0))
    finally:
        sys.setprofile(None)
    by_file: dict[Path, set[int]] = {}
    for name, first_line in on_path:
        by_file.setdefault(Path(name), set()).add(first_line)
    return by_file


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    rows = []
    for path, first_lines in functions_on_the_path().items():
        lines = code_lines(path)
        rows.append((len(lines & function_lines(path, first_lines)), len(lines), path))
    print("  ran  file")
    for ran, whole, path in sorted(rows, key=lambda row: -row[0]):
        print(f"{ran:5d} {whole:5d}  {path.relative_to(PACKAGE.parent)}")
    print(f"{sum(r for r, _, _ in rows):5d} {sum(w for _, w, _ in rows):5d}  in {len(rows)} files")
    longest = max(PACKAGE.rglob("*.py"), key=lambda path: len(code_lines(path)))
    print(f"      {len(code_lines(longest)):5d}  longest: {longest.relative_to(PACKAGE.parent)}")


if __name__ == "__main__":
    main()
