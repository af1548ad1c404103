"""`opgrip trace diff`: what differs between two traces."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.tools.verbs.verb import Verb, verbs
from opgrip.traces.command import add_debug, add_reading, positive, printable
from opgrip.traces.option_types import names, percent
from opgrip.traces.tables import TableColumn, print_table
from opgrip.traces.terminal import print_line

if TYPE_CHECKING:
    from opgrip.traces.differences import Difference, Row

KINDS = ("came", "went", "counts", "shares", "values")
ANY = "any"
EXAMPLES = """\
examples:
  opgrip trace diff main.jsonl branch.jsonl
  opgrip trace diff main.jsonl branch.jsonl --fail-on came,went -o difference.md

Signatures are the same where they call the same operator with arguments of the same shapes, strides, dtypes and scalars
under the same settings, whatever their numbers. exit status: 1 where something is found that --fail-on names
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("before", type=Path, metavar="A", help="a trace, or a file of another tool")
    parser.add_argument("after", type=Path, metavar="B", help="what is held against it")
    parser.add_argument(
        "--fail-on", type=names, default=(), metavar="KINDS", help=f"exit with status 1: {','.join(KINDS)} or {ANY}"
    )
    parser.add_argument(
        "--share",
        type=percent,
        default=0.05,
        metavar="PERCENT",
        help="of the time that a share may move (default: 5%%)",
    )
    parser.add_argument(
        "--spread", type=percent, default=0.1, metavar="PERCENT", help="of their spread that values may (default: 10%%)"
    )
    parser.add_argument("--top", type=positive, default=30, metavar="N", help="rows to show (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write all to a .json, or the rows to a .md")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser, "take what there is of cut or damaged traces")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print the signatures that differ."""
    from opgrip.traces import load
    from opgrip.traces.differences import Tolerances, check_form, compare_traces, write_difference
    from opgrip.traces.errors import UserError
    from opgrip.traces.output import check_writable

    if strange := [kind for kind in args.fail_on if kind not in (*KINDS, ANY)]:
        raise UserError(f"--fail-on {strange[0]} is no difference", f"choose from {', '.join((*KINDS, ANY))}")
    if args.output is not None:
        check_form(args.output)
        check_writable(args.output, args.force)
    before, after = (load(path, args.partial, args.unbounded) for path in (args.before, args.after))
    tolerances = Tolerances(shares=args.share, values=args.spread)
    difference = compare_traces(before, after, (str(args.before), str(args.after)), tolerances)
    _print(difference, args.top)
    if args.output is not None:
        write_difference(difference, args.output, args.force)
    return int(any(difference.of_kind(kind) for kind in (KINDS if ANY in args.fail_on else args.fail_on)))


def _print(difference: Difference, top: int) -> None:
    for name, *sides in difference.facts:
        one, other = (printable(side if isinstance(side, str) else json.dumps(side, default=str)) for side in sides)
        print_line(f"{name:<12}{one} → {other}", sys.stdout, indent=12)
    changed = difference.changed
    counts = ", ".join(f"{kind} {len(difference.of_kind(kind)):,}" for kind in KINDS)
    print_line(f"{'signatures':<12}{len(difference.rows):,}: {counts}", sys.stdout, indent=12)
    if not changed:
        return
    print()
    rows = changed[:top]
    print_table(_columns(rows), sys.stdout, f"signatures that differ ({len(changed):,} in all)")


def _columns(rows: list[Row]) -> list[TableColumn]:
    from opgrip.traces.differences.files import values_text

    return [
        TableColumn("what", [", ".join(row.kinds) for row in rows], is_number=False, least=6),
        TableColumn("calls", [_pair(*(f"{count:,}" for count in row.counts)) for row in rows]),
        TableColumn("share", [_pair(*(f"{share:.1%}" for share in row.shares)) for row in rows]),
        TableColumn("median us", [_pair(*map(_time, row.median_us)) for row in rows], rank=1),
        TableColumn("call", [printable(row.call) for row in rows], is_number=False, least=24, most=160),
        TableColumn("values", [values_text(row) for row in rows], is_number=False, rank=2, below=True),
    ]


def _pair(one: str, other: str) -> str:
    return one if one == other else f"{one} → {other}"


def _time(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:,.1f}"


verbs.register("trace diff")(Verb("what differs between two traces", EXAMPLES, prepare, run))
