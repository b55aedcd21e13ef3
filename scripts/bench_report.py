"""The README's table, and a plot, from the benchmarks' JSON lines.

    python scripts/bench_report.py results.jsonl --plot bench.png

Each workload is a row: every engine's median with the spread of its repetitions, the floor, our
median over the other's, and the share of the floor that we reach.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

OURS = "nanovllm"
ENGINES = (OURS, "vllm", "hf")
Results = dict[str, dict[str, dict[str, Any]]]  # workload -> engine -> result


def read(paths: list[str]) -> Results:
    """Results by workload and engine; repetitions of separate runs are joined."""
    results: Results = defaultdict(dict)
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            seen = results[result["workload"]].get(result["engine"])
            if seen is None:
                results[result["workload"]][result["engine"]] = result
                continue
            seen["all"] += result["all"]
            values = sorted(seen["all"])
            middle = len(values) // 2
            seen["median"] = (values[middle] + values[~middle]) / 2
            if "floor" in seen:
                # Of several machines or minutes: the lowest is what could be reached.
                seen["floor"] = min(seen["floor"], result["floor"])
    return results


def number(value: float) -> str:
    """Three or four significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 10 else f"{value:.2f}"


def cell(result: dict[str, Any] | None) -> str:
    """median (least to most)"""
    if result is None:
        return "-"
    least, most = min(result["all"]), max(result["all"])
    return f"{number(result['median'])} ({number(least)}-{number(most)})"


def table(results: Results) -> str:
    """GitHub-flavoured markdown."""
    engines = [e for e in ENGINES if any(e in by_engine for by_engine in results.values())]
    others = [engine for engine in engines if engine != OURS]
    header = ["workload", "unit", "floor", *engines, *(f"ours / {e}" for e in others), "of floor"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for workload, by_engine in results.items():
        ours = by_engine.get(OURS)
        any_result = ours or next(iter(by_engine.values()))
        floor = any_result.get("floor")
        row = [workload, any_result["unit"], "-" if floor is None else number(floor)]
        row += [cell(by_engine.get(engine)) for engine in engines]
        for engine in others:
            other = by_engine.get(engine)
            row.append("-" if not ours or not other else f"{ours['median'] / other['median']:.2f}")
        row.append("-" if not ours or floor is None else f"{floor / ours['median']:.0%}")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def plot(results: Results, path: str) -> None:
    """Every workload's times relative to the slowest engine's, with the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {name: by_engine for name, by_engine in results.items() if len(by_engine) > 1}
    figure, axes = plt.subplots(1, len(shown), figsize=(2.6 * len(shown), 3.2), squeeze=False)
    colors = dict(zip(ENGINES, ("#2a7f62", "#8a8f98", "#c9a227"), strict=True))
    for axis, (workload, by_engine) in zip(axes[0], shown.items(), strict=True):
        engines = [engine for engine in ENGINES if engine in by_engine]
        medians = [by_engine[engine]["median"] for engine in engines]
        spread = [
            [m - min(by_engine[e]["all"]) for e, m in zip(engines, medians, strict=True)],
            [max(by_engine[e]["all"]) - m for e, m in zip(engines, medians, strict=True)],
        ]
        axis.bar(engines, medians, yerr=spread, capsize=3, color=[colors[e] for e in engines])
        floor = by_engine[engines[0]].get("floor")
        if floor is not None:
            axis.axhline(floor, color="black", linestyle="--", linewidth=1)
            axis.annotate(
                "floor", (len(engines) - 0.55, floor), va="bottom", ha="right", fontsize=8
            )
        axis.set_title(workload.replace(", ", ",\n"), fontsize=9)
        axis.set_ylabel(by_engine[engines[0]]["unit"], fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", help="JSON lines that the bench scripts wrote")
    parser.add_argument("--plot", help="PNG to write")
    args = parser.parse_args()
    results = read(args.files)
    print(table(results))
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
