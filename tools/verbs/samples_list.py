"""`opgrip samples list`: the samples that ship."""

from __future__ import annotations

import argparse
import sys
from operator import itemgetter

from opgrip.cli.command import add_debug, counted
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.tools.verbs.verb import Verb, verbs

EXAMPLES = """\
examples:
  opgrip samples list
  opgrip samples list --tag ForLoop --tag InputAware    those that have both
  opgrip samples list --source mmdetection '*_loss'
"""
COLUMNS = (
    TableColumn("name", itemgetter(0), least=30),
    TableColumn("family", itemgetter(1), least=10, rank=1),
    TableColumn("tags", itemgetter(2), least=24),
    TableColumn("project", itemgetter(3), rank=2),
    TableColumn("", itemgetter(4)),
)


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("names", nargs="*", metavar="GLOB", help="only samples whose names match")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="only with this tag; can be repeated")
    parser.add_argument("--source", metavar="TEXT", help="only from projects with this in their name or address")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print one line per sample, with tab-separated columns in a pipe."""
    from opgrip.replay.cases.sources.samples import find_samples

    samples = find_samples(patterns=args.names, tags=args.tag)
    if not samples:
        raise UserError("no sample has these names and tags", "opgrip samples list shows all")
    if args.source is not None:
        samples = [sample for sample in samples if args.source.lower() in f"{sample.project} {sample.url}".lower()]
        if not samples:
            raise UserError(f"no sample is from {args.source!r}", "opgrip samples list shows where all are from")
    rows = [
        (
            sample.name,
            sample.family,
            " ".join(sorted(tag.value for tag in sample.tags)),
            sample.project,
            "jax" if sample.has_jax() else "",
        )
        for sample in samples
    ]
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(row) + "\n" for row in rows)
        return 0
    print_table(COLUMNS, rows, sys.stdout)
    print(counted(len(rows), "sample"))
    return 0


verbs.register("samples list")(Verb("list the samples that ship", EXAMPLES, prepare, run))
