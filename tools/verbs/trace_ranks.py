"""`opgrip trace ranks`: which ranks of a merged trace wait for which."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.command import add_debug, add_reading, positive, printable
from opgrip.cli.output_files import check_writable, whole_file
from opgrip.cli.plural import counted
from opgrip.cli.progress import Reporter
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.tools.verbs.verb import Verb, verbs

if TYPE_CHECKING:
    import pandas as pd

    from opgrip.traces.analysis.ranks.waits import Waits

EXAMPLES = """\
examples:
  opgrip trace merge step.rank*.jsonl -o step.jsonl && opgrip trace ranks step.jsonl
  opgrip trace ranks step.jsonl --json | jq '.pairs[0]'
  opgrip trace ranks step.jsonl -o waits.json
"""
SUFFIXES = (".json", ".csv")


def prepare(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace that opgrip trace merge wrote")
    parser.add_argument(
        "--top",
        type=positive,
        default=12,
        metavar="N",
        help="rows of the tables of pairs and places (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write all tables as .json, or that of the ranks as .csv"
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_reading(parser, "take what there is of a cut or damaged trace")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Print what each rank did, who waited for whom, and in which collectives."""
    from opgrip.traces.analysis.ranks.waits import find_waits

    if args.output is not None:
        if args.output.suffix not in SUFFIXES:
            raise UserError(f"{args.output} is neither {' nor '.join(SUFFIXES)}", "name one of these")
        check_writable(args.output, args.force)
    with Reporter(args.prog).reading(args.trace):
        waits = find_waits(args.trace, args.partial, args.unbounded)
    if args.output is not None:
        _write(waits, args.output, args.force)
        print(f"{args.prog}: {counted(len(waits.ranks), 'rank')} to {args.output}", file=sys.stderr)
    if args.json:
        print(json.dumps(waits.as_json(), indent=1))
        return 0
    print_table(_rank_columns(waits.ranks), sys.stdout, f"ranks ({len(waits.ranks)} in all)")
    pairs, places = waits.pairs.head(args.top), waits.places.head(args.top)
    print_table(_pair_columns(pairs), sys.stdout, f"who waits for whom ({len(waits.pairs)} pairs in all)")
    print_table(_place_columns(places), sys.stdout, f"collectives by waiting time ({len(waits.places)} places in all)")
    if unknown := int(waits.ranks["unknown"].sum()):
        print_line(
            f"{counted(unknown, 'call')} of collectives without a known end: their results were not taken", sys.stdout
        )
    if waits.unmatched:
        print_line(f"{counted(waits.unmatched, 'call')} of collectives that no other rank's trace has", sys.stdout)
    return 0


def _write(waits: Waits, path: Path, force: bool) -> None:
    with whole_file(path, force) as file:
        if path.suffix == ".csv":
            file.write(waits.ranks.to_csv(index=False).encode())
        else:
            file.write(f"{json.dumps(waits.as_json(), indent=1)}\n".encode())


def _rank_columns(table: pd.DataFrame) -> list[TableColumn]:
    return [
        _whole(table, "rank"),
        _whole(table, "calls", rank=6),
        _ms(table, "span_ms", "span ms"),
        _ms(table, "compute_ms", "compute ms"),
        _whole(table, "collectives", rank=5),
        _ms(table, "collective_ms", "collective ms"),
        _ms(table, "waiting_ms", "waiting ms"),
        TableColumn("share", [f"{share:.1%}" for share in table["share"]]),
        _whole(table, "last", "came last", rank=4),
        _ms(table, "caused_ms", "others wait for it ms", rank=3),
    ]


def _pair_columns(table: pd.DataFrame) -> list[TableColumn]:
    return [
        _whole(table, "rank"),
        _whole(table, "waits_for", "waits for"),
        _whole(table, "collectives"),
        _ms(table, "waiting_ms", "waiting ms"),
    ]


def _place_columns(table: pd.DataFrame) -> list[TableColumn]:
    places = [
        f"{printable(function)} {printable(file)}:{line}".strip() if file else ""
        for function, file, line in zip(table["function"], table["file"], table["line"], strict=True)
    ]
    return [
        _ms(table, "waiting_ms", "waiting ms"),
        _ms(table, "longest_ms", "longest ms", rank=5),
        _whole(table, "collectives"),
        _whole(table, "slowest", "mostly for rank"),
        TableColumn("collective", list(table["kind"]), is_number=False),
        TableColumn("group", [printable(group) for group in table["group"]], is_number=False, rank=6),
        _whole(table, "size_bytes", "bytes", rank=4),
        TableColumn("place", places, is_number=False, rank=3),
    ]


def _whole(table: pd.DataFrame, name: str, heading: str = "", rank: int = 0) -> TableColumn:
    return TableColumn(heading or name, [f"{value:,}" for value in table[name]], rank=rank)


def _ms(table: pd.DataFrame, name: str, heading: str, rank: int = 0) -> TableColumn:
    return TableColumn(heading, [f"{value:,.2f}" for value in table[name]], rank=rank)


verbs.register("trace ranks")(Verb("tell which ranks wait for which", EXAMPLES, prepare, run))
