"""`nanovllm walkthrough`: keep the walkthroughs true, and publish them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nanovllm.exceptions import VLLMValidationError

TEMPLATE = """\
<!-- scenario: {scenario} -->
# {number}. {title}

What this is about, and what the reader can do after it.

## The first thing to see

<!-- stop first
at: {example}
show: self
-->
[`{example}`] is where it begins.

## Questions

1. A question whose answer can be found by running something?
"""

SCENARIO = '''\
"""What happens in it, in one sentence."""

from nanovllm import LLM, SamplingParams

# Set-up: runs before the recording begins.
llm = LLM(enforce_eager=True, seed=0)


def main() -> None:
    """What the walkthrough watches."""
    params = SamplingParams(temperature=0.0, max_tokens=4)
    llm.generate(["Once upon a time"], params, use_tqdm=False)


if __name__ == "__main__":
    main()
'''


def find_root() -> Path:
    """The repository the package is in: walkthroughs are not installed with it."""
    import nanovllm

    root = Path(nanovllm.__file__).resolve().parent.parent
    if not (root / "walkthroughs").is_dir():
        raise VLLMValidationError(
            f"there is no folder walkthroughs in {str(root)!r}; clone the repository and install "
            "it with `pip install -e .`."
        )
    return root


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb to the `nanovllm` command."""
    parser = subparsers.add_parser(
        "walkthrough",
        help="check, mend and publish the walkthroughs",
        description="Keep the walkthroughs true to the code. `new --help` says how to write one.",
    )
    parser.set_defaults(run=lambda args: parser.print_help())
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")

    check = verbs.add_parser("check", help="say what is not true any more")
    check.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    check.add_argument("--no-run", action="store_true", help="links and anchors only")
    check.add_argument("--uncited", action="store_true", help="list public symbols nobody names")
    check.set_defaults(run=run_check)

    fix = verbs.add_parser("fix", help="write links, tables of values, .tours and .vscode")
    fix.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    fix.set_defaults(run=run_fix)

    accept = verbs.add_parser("accept", help="prose about changed code was read again")
    accept.add_argument("name", metavar="NAME")
    accept.add_argument("labels", nargs="*", metavar="LABEL", help="default: all of it")
    accept.set_defaults(run=run_accept)

    # Imported for its text alone; it imports nothing.
    import nanovllm.tour

    new = verbs.add_parser(
        "new",
        help="start a walkthrough (its --help is the author's guide)",
        epilog=nanovllm.tour.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    new.add_argument("name", metavar="NN-NAME")
    new.add_argument("--title", metavar="TEXT")
    new.add_argument("--scenario", metavar="NAME", help="default: NAME without its number")
    new.set_defaults(run=run_new)

    html = verbs.add_parser("html", help="write them as web pages that need no network")
    html.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    html.add_argument("--out", metavar="DIR", required=True, type=Path)
    html.set_defaults(run=run_html)


def prepare_to_run() -> None:
    """Scenarios start engines, whose greetings would stand between our lines, and launch Triton
    kernels on machines without a GPU."""
    import logging
    import os

    logging.disable(logging.INFO)
    # Read when a kernel is defined, so before the first scenario imports the engine.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def run_check(args: argparse.Namespace) -> None:
    from nanovllm.tour.anchors import Project
    from nanovllm.tour.check import check, uncited
    from nanovllm.tour.walkthrough import find_name

    project = Project(find_root())
    names = [find_name(project, name) for name in args.names]
    prepare_to_run()
    report = check(project, names, run=not args.no_run)
    for problem in report.problems:
        print(problem)
    for walkthrough in report.walkthroughs:
        print(walkthrough.summary(), file=sys.stderr)
    if args.uncited:
        for symbol in uncited(project, report.walkthroughs):
            print(f"no walkthrough names {symbol}")
    count = len(report.problems)
    print(f"{count} problem{'s' * (count != 1)}", file=sys.stderr)
    if report.problems:
        raise SystemExit(1)


def run_fix(args: argparse.Namespace) -> None:
    from nanovllm.tour.anchors import Project
    from nanovllm.tour.check import fix
    from nanovllm.tour.walkthrough import find_name

    project = Project(find_root())
    prepare_to_run()
    written, problems = fix(project, [find_name(project, name) for name in args.names])
    for path in written:
        print(f"wrote {path}")
    for problem in problems:
        print(problem)


def run_accept(args: argparse.Namespace) -> None:
    from nanovllm.tour.anchors import Project
    from nanovllm.tour.check import accept
    from nanovllm.tour.walkthrough import find_name

    project = Project(find_root())
    accepted = accept(project, find_name(project, args.name), args.labels)
    print("\n".join(f"accepted {text}" for text in accepted) or "nothing to accept")


def run_new(args: argparse.Namespace) -> None:
    number, _, name = args.name.partition("-")
    if not number.isdigit() or not name:
        raise VLLMValidationError(f"a walkthrough is called NN-NAME, such as 02-scheduler, "
                                  f"not {args.name!r}.")  # fmt: skip
    folder = find_root() / "walkthroughs"
    scenario = args.scenario or name
    file, script = folder / f"{args.name}.md", folder / "scenarios" / f"{scenario}.py"
    if file.exists():
        raise VLLMValidationError(f"{str(file)!r} exists already.")
    title = args.title or name.replace("-", " ").capitalize()
    file.write_text(
        TEMPLATE.format(scenario=scenario, number=number, title=title, example="LLM.generate"),
        encoding="utf-8",
    )
    print(f"wrote {file}")
    if not script.exists():
        script.parent.mkdir(exist_ok=True)
        script.write_text(SCENARIO, encoding="utf-8")
        print(f"wrote {script}")


def run_html(args: argparse.Namespace) -> None:
    from nanovllm.tour.anchors import Project
    from nanovllm.tour.html import write_html
    from nanovllm.tour.walkthrough import find_name

    prepare_to_run()
    project = Project(find_root())
    for path in write_html(project, args.out, [find_name(project, n) for n in args.names]):
        print(f"wrote {path}")
