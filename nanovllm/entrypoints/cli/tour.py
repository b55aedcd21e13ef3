"""`nanovllm tour`: read a walkthrough in the terminal, with the values of a run."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the verb to the `nanovllm` command."""
    parser = subparsers.add_parser(
        "tour",
        help="read a walkthrough beside the code, with live values",
        description="Run a walkthrough's scenario once, then page through its stops: prose, "
        "source, values. When output is not a terminal, everything is printed.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="02-scheduler, 02 or scheduler")
    parser.add_argument("--list", action="store_true", help="list the walkthroughs")
    parser.add_argument("--live", action="store_true", help="stop in pdb at each stop instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from nanovllm.entrypoints.cli.walkthrough import find_root, prepare_to_run
    from nanovllm.tour.anchors import Project
    from nanovllm.tour.pager import list_tours, run_live, run_tour
    from nanovllm.tour.walkthrough import find_name

    prepare_to_run()
    project = Project(find_root())
    if args.list or args.name is None:
        list_tours(project)
    elif args.live:
        run_live(project, find_name(project, args.name))
    else:
        run_tour(project, find_name(project, args.name))
