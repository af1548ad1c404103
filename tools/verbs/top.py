"""`opgrip top`: a long table of results, walked by keyboard."""

from __future__ import annotations

import argparse
import sys

from opgrip.cli.command import add_debug
from opgrip.cli.extras import needed
from opgrip.tools.verbs.kept_runs import add_run
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip top results.json
  opgrip top latest          the newest run of the store

keys: arrows and pages walk, s sorts by the column, / filters, n shows what is not ok, Enter a row's details, q ends.
In a pipe it prints the table.
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add_run(parser)
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Show the table until the user leaves it."""
    from opgrip.replay.compare.store.store import Store
    from opgrip.replay.outcome import read_run
    from opgrip.replay.reports.table import print_results

    results = read_run(Store(args.store).find(args.which))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print_results(list(results), sys.stdout)
        return 0
    needed("textual", "top")
    from opgrip.tools.browser.app import ResultsBrowser

    ResultsBrowser(list(results), str(results.header.get("trace", args.which))).run()
    return 0


verbs.register("top")(Verb("a long table of results, walked by keyboard", EXAMPLES, prepare, run))
