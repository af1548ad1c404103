"""`opgrip samples list`: the samples that ship."""

from __future__ import annotations

import argparse
import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.traces.command import add_debug
from opgrip.traces.errors import UserError

EXAMPLES = """\
examples:
  opgrip samples list
  opgrip samples list --tag ForLoop --tag InputAware    those that have both
  opgrip samples list --source mmdetection '*_loss'
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("names", nargs="*", metavar="GLOB", help="only samples of such names")
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="only with this tag; can be repeated")
    parser.add_argument("--source", metavar="TEXT", help="only from projects with this in their name or address")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line a sample; in a pipe, columns with tabs between them."""
    from opgrip.replay.cases.samples import find_samples

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
    console = Console(highlight=False)
    if not console.is_terminal:
        sys.stdout.writelines("\t".join(row) + "\n" for row in rows)
        return 0
    table = Table("name", "family", "tags", "project", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    console.print(f"{len(rows)} samples")
    return 0


verbs.register("samples list")(Verb("list the samples that ship", EXAMPLES, prepare, run))
