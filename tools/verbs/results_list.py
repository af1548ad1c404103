"""`opgrip results list`: the runs that opreplay has stored."""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from opgrip.cli.command import add_debug
from opgrip.tools.verbs.verb import Verb, verbs


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the option for the folder of the store."""
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="folder of the results store (default: $OPGRIP_STORE, or results)"
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument `which` for a run, and the option for its store."""
    names = "a file of opreplay, a run of the store (or the start or end of its name), or latest"
    parser.add_argument("which", metavar="RUN", help=names)
    add_store(parser)


MOST_OF_NAME = 60
"""maximum number of characters of a cell; with --operator, the trace column contains all inputs"""

EXAMPLES = """\
examples:
  opgrip results list
  opgrip results list --trace '*faster_rcnn*'
  opgrip results list --store /shared/results --json | jq '.[].name'
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    add_store(parser)
    parser.add_argument("--trace", metavar="GLOB", help="only runs of traces that match")
    parser.add_argument("--machine", metavar="GLOB", help="only runs on machines that match")
    parser.add_argument("--json", action="store_true", help="print all known facts about each run as JSON")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print one line per run, newest last."""
    from opgrip.display.tables import TableColumn, print_table
    from opgrip.replay.comparison.results_store import Store

    store = Store(args.store)
    found = []
    for kept in store.runs():
        about = kept.summary()
        if fnmatchcase(about.trace, args.trace or "*") and fnmatchcase(about.machine, args.machine or "*"):
            found.append((kept, about))
    if args.json:
        json.dump([{"name": kept.name, "path": str(kept.path), **about.plain()} for kept, about in found], sys.stdout)
        print()
        return 0
    if not found:
        print(f"{args.prog}: {store.folder} holds no such runs: opreplay keeps one a replay", file=sys.stderr)
        return 0
    columns = [
        TableColumn("run", lambda row: row[0].name, most=MOST_OF_NAME),
        TableColumn("machine", lambda row: row[1].machine, rank=4, most=MOST_OF_NAME),
        TableColumn("device", lambda row: row[1].device, rank=3, most=MOST_OF_NAME),
        TableColumn("trace", lambda row: row[1].trace, most=MOST_OF_NAME),
        TableColumn("modes", lambda row: ", ".join(row[1].modes), rank=2, most=MOST_OF_NAME),
        TableColumn("dtype", lambda row: ", ".join(row[1].dtypes), most=MOST_OF_NAME, when=lambda row: row[1].dtypes),
        TableColumn("torch", lambda row: row[1].torch, rank=5, most=MOST_OF_NAME),
        TableColumn("cases", lambda row: row[1].cases, ",d"),
        TableColumn("ok", lambda row: row[1].ok, ",d"),
    ]
    print_table(columns, found, sys.stdout)
    return 0


verbs.register("results list")(Verb("the runs that opreplay kept", EXAMPLES, prepare, run))
