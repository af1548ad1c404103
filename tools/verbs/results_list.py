"""`opgrip results list`: the runs that opreplay kept."""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from opgrip.cli.command import add_debug
from opgrip.tools.verbs.verb import Verb, verbs


def add_store(parser: argparse.ArgumentParser) -> None:
    """Give a verb the store that it looks into."""
    parser.add_argument("--store", type=Path, metavar="DIR", help="where runs are (default: $OPGRIP_STORE, or results)")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Give a verb the run that it works on, `which`, and its store."""
    names = "a file of opreplay, a run of the store or what its name begins or ends with, or latest"
    parser.add_argument("which", metavar="RUN", help=names)
    add_store(parser)


MOST_OF_NAME = 60
"""Characters of a cell: with --operator, what stands for the trace holds all inputs."""

EXAMPLES = """\
examples:
  opgrip results list
  opgrip results list --trace '*faster_rcnn*'
  opgrip results list --store /shared/results --json | jq '.[].name'
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_store(parser)
    parser.add_argument("--trace", metavar="GLOB", help="only runs of such traces")
    parser.add_argument("--machine", metavar="GLOB", help="only runs of such machines")
    parser.add_argument("--json", action="store_true", help="print all that is known of each")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line a run, the newest last."""
    from opgrip.display.tables import TableColumn, print_table
    from opgrip.replay.comparison.store.store import Store

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
    columns = {
        "run": [kept.name for kept, _ in found],
        "machine": [about.machine for _, about in found],
        "device": [about.device for _, about in found],
        "trace": [about.trace for _, about in found],
        "modes": [", ".join(about.modes) for _, about in found],
        "dtype": [", ".join(about.dtypes) for _, about in found],
        "torch": [about.torch for _, about in found],
        "cases": [f"{about.cases:,}" for _, about in found],
        "ok": [f"{about.ok:,}" for _, about in found],
    }
    if not any(columns["dtype"]):
        del columns["dtype"]
    ranks = {"machine": 4, "device": 3, "torch": 5, "modes": 2}
    numbers = {"cases", "ok"}
    print_table(
        [
            TableColumn(name, cells, name in numbers, ranks.get(name, 0), most=MOST_OF_NAME)
            for name, cells in columns.items()
        ],
        sys.stdout,
    )
    return 0


verbs.register("results list")(Verb("the runs that opreplay kept", EXAMPLES, prepare, run))
