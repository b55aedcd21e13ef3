"""How much code lies between LLM.generate and Sampler.forward?

    python scripts/core_path.py

Runs one prompt on the embedded model under a profiler, collects every file of nanovllm in which a
function ran from the call of LLM.generate on until Sampler.forward returned for the last time, and
counts their lines of code whole (docstrings, comments and blank lines aside). The longest file of the
package is named too.
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


def count_code_lines(path: Path) -> int:
    """Lines that hold code: not blank, not only a comment, not part of a docstring."""
    source = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                if isinstance(first.value.value, str):
                    lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def files_on_the_path() -> list[Path]:
    """Files of the package whose functions run between LLM.generate and the last Sampler.forward."""
    llm = LLM(enforce_eager=True, num_gpu_blocks_override=64, max_model_len=256)
    called: set[str] = set()
    on_path: set[str] = set()

    def profile(frame: FrameType, event: str, _arg: Any) -> None:
        if event != "call" and event != "return":
            return
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(PACKAGE)):
            called.add(name)
        if event == "return" and frame.f_code.co_qualname == "Sampler.forward":
            on_path.update(called)

    sys.setprofile(profile)
    try:
        llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=1.0, seed=0))
    finally:
        sys.setprofile(None)
    return sorted(Path(name) for name in on_path)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    counts = {path: count_code_lines(path) for path in files_on_the_path()}
    for path, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{count:6d}  {path.relative_to(PACKAGE.parent)}")
    print(f"{sum(counts.values()):6d}  lines of code in {len(counts)} files on the path")
    longest = max(PACKAGE.rglob("*.py"), key=count_code_lines)
    print(f"{count_code_lines(longest):6d}  in the longest file, {longest.relative_to(PACKAGE.parent)}")


if __name__ == "__main__":
    main()
