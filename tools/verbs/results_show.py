"""`opgrip results show`: the origin of a run, and its rows."""

from __future__ import annotations

import argparse
import json
import sys

from opgrip.cli.command import add_debug, positive, printable
from opgrip.tools.verbs.results_list import add_run
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip results show latest
  opgrip results show 20261123T101500-bert-1f2e3d --top 20
  opgrip results show nightly.parquet
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    add_run(parser)
    parser.add_argument("--top", type=positive, metavar="N", help="rows to show (default: all)")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print the header, then the table as opreplay prints it."""
    from opgrip.replay.comparison.results_store import Store
    from opgrip.replay.outcome import read_run
    from opgrip.replay.reports.results_table import print_results
    from opgrip.replay.results.results import summarize

    results = read_run(Store(args.store).find(args.which))
    apart = ("environment", "accelerator", "ceilings")
    facts = {name: value for name, value in results.header.items() if name not in apart}
    lines = [*facts.items(), *results.header.get("environment", {}).items()]
    width = max((len(printable(name)) for name, _ in lines), default=0)
    for name, value in lines:
        print(f"{printable(name):<{width}}  {printable(value if isinstance(value, str) else json.dumps(value))}")
    rows = list(results.rows)
    print()
    print_results(rows[: args.top], sys.stdout)
    print(summarize(rows))
    return 0


verbs.register("results show")(Verb("where a run comes from, and its rows", EXAMPLES, prepare, run))
