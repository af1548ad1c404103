"""`opgrip trace merge` and `ranks`: one trace of several processes, and how they wait for each other."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import add_reading, counted, positive
from opgrip.cli.output_files import check_output, write_json, write_text
from opgrip.cli.progress import Reporter
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.tools.verbs import add_output, verb

if TYPE_CHECKING:
    import pandas as pd

MERGE_EXAMPLES = """\
examples:
  opgrip trace merge step.rank0.jsonl step.rank1.jsonl -o step.jsonl
  opgrip trace merge train.jsonl train.pid*.jsonl -o all.jsonl.zst    a process and its DataLoader workers
"""


def prepare_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="traces")
    add_output(parser, "the trace to write", required=True)
    add_reading(parser, "also read cut or damaged traces, as far as possible")


@verb("trace merge", "join the traces of several processes", MERGE_EXAMPLES, prepare_merge)
def run_merge(args: argparse.Namespace) -> int:
    from opgrip.traces.analysis.merge import merge

    end = merge(args.traces, args.output, args.force, args.partial, args.unbounded)
    origin = f"{len(args.traces)} traces" if len(args.traces) > 1 else "one trace"
    print(
        f"{args.prog}: {end.calls:,} calls of {end.signatures:,} signatures from {origin}, to {args.output}",
        file=sys.stderr,
    )
    return 0


RANKS_EXAMPLES = """\
examples:
  opgrip trace merge step.rank*.jsonl -o step.jsonl && opgrip trace ranks step.jsonl
  opgrip trace ranks step.jsonl --json | jq '.pairs[0]'
  opgrip trace ranks step.jsonl -o waits.json
"""


def prepare_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace written by opgrip trace merge")
    parser.add_argument(
        "--top",
        type=positive,
        default=12,
        metavar="N",
        help="rows of the tables of pairs and call sites (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    add_output(parser, "write all tables as .json, or the table of ranks as .csv")
    add_reading(parser, "also read a cut or damaged trace, as far as possible")


@verb("trace ranks", "report which ranks wait for which", RANKS_EXAMPLES, prepare_ranks)
def run_ranks(args: argparse.Namespace) -> int:
    from opgrip.traces.analysis.ranks.waits import find_waits

    check_output(args.output, args.force, (".json", ".csv"))
    with Reporter(args.prog).reading(args.trace):
        waits = find_waits(args.trace, args.partial, args.unbounded)
    if args.output is not None:
        if args.output.suffix == ".csv":
            write_text(waits.ranks.to_csv(index=False), args.output, args.force)
        else:
            write_json(waits.as_json(), args.output, args.force)
        print(f"{args.prog}: {counted(len(waits.ranks), 'rank')} to {args.output}", file=sys.stderr)
    if args.json:
        print(json.dumps(waits.as_json(), indent=1))
        return 0
    _print_table(RANKS, waits.ranks, f"ranks ({len(waits.ranks)} in all)")
    pairs, places = waits.pairs.head(args.top), waits.places.head(args.top)
    _print_table(PAIRS, pairs, f"who waits for whom ({len(waits.pairs)} pairs in all)")
    _print_table(PLACES, places, f"collectives by waiting time ({len(waits.places)} places in all)")
    if unknown := int(waits.ranks["unknown"].sum()):
        print_line(
            f"{counted(unknown, 'call')} of collectives without a known end: their results were not awaited",
            sys.stdout,
        )
    if waits.unmatched:
        print_line(
            f"{counted(waits.unmatched, 'call')} of collectives missing in the traces of other ranks", sys.stdout
        )
    return 0


def _print_table(columns: Sequence[TableColumn], table: pd.DataFrame, title: str) -> None:
    print_table(columns, list(table.itertuples()), sys.stdout, title)


def _place(row: Any) -> str:
    return f"{row.function} {row.file}:{row.line}".strip() if row.file else ""


RANKS = (
    TableColumn("rank", "rank", ",d"),
    TableColumn("calls", "calls", ",d", rank=6),
    TableColumn("span ms", "span_ms", ",.2f"),
    TableColumn("compute ms", "compute_ms", ",.2f"),
    TableColumn("collectives", "collectives", ",d", rank=5),
    TableColumn("collective ms", "collective_ms", ",.2f"),
    TableColumn("waiting ms", "waiting_ms", ",.2f"),
    TableColumn("share", "share", ".1%"),
    TableColumn("came last", "last", ",d", rank=4),
    TableColumn("waited for ms", "caused_ms", ",.2f", rank=3),
)
PAIRS = (
    TableColumn("rank", "rank", ",d"),
    TableColumn("waits for", "waits_for", ",d"),
    TableColumn("collectives", "collectives", ",d"),
    TableColumn("waiting ms", "waiting_ms", ",.2f"),
)
PLACES = (
    TableColumn("waiting ms", "waiting_ms", ",.2f"),
    TableColumn("longest ms", "longest_ms", ",.2f", rank=5),
    TableColumn("collectives", "collectives", ",d"),
    TableColumn("mostly for rank", "slowest", ",d"),
    TableColumn("collective", "kind"),
    TableColumn("group", "group", rank=6),
    TableColumn("bytes", "size_bytes", ",d", rank=4),
    TableColumn("place", _place, rank=3),
)
