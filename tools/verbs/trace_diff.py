"""`opgrip trace diff` and `validate`: compare traces, and check that they conform to the format."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.command import UNBOUNDED_HELP, add_reading, counted, printable
from opgrip.cli.option_types import names, percent
from opgrip.cli.output_files import check_output, write_json
from opgrip.cli.progress import Reporter
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.tools.verbs import add_output, add_top, report_output, verb

if TYPE_CHECKING:
    from opgrip.traces.analysis.differences import Row, Tolerances, TraceDifference
    from opgrip.traces.analysis.validation import Validation

KINDS = ("came", "went", "counts", "shares", "values")
OPERATORS = "operators"  # word of `--fail-on` for changed shares of operators, whatever their shapes
CHOICES = (*KINDS, OPERATORS)
ANY = "any"
# default tolerances between sets of recordings, which differ by noise because their inputs differ
SEVERAL_COUNTS, SEVERAL_LEAST = 0.1, 0.001
DIFF_EXAMPLES = """\
examples:
  opgrip trace diff main.jsonl branch.jsonl
  opgrip trace diff main.jsonl branch.jsonl --fail-on came,went -o difference.md
  opgrip trace diff monday/ friday/ -o shifts.json       all traces of two folders, such as the recordings of a service
  opgrip trace diff 'monday/*.rank0.jsonl' 'friday/*.rank0.jsonl' --fail-on operators

Two signatures are the same if they call the same operator with arguments of the same shapes, strides, dtypes and
scalars under the same settings; their numbers do not matter, so redacted traces can be compared. Strides and settings
are ignored if one side is a file of another tool, such as a profile. Calls are counted per
step if the traces record steps, and in total if a side has several traces.
Kinds of differences: came (signatures only in B), went (only in A), counts (other numbers of calls), shares (other
shares of the time), values (other statistics of values), operators (other shares of the time, whatever the shapes).
exit status: 1 if a difference of a kind in --fail-on was found
"""


def prepare_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "before",
        type=Path,
        metavar="A",
        help="a trace, a folder of traces, a pattern of file names, or a file that another tool wrote",
    )
    parser.add_argument(
        "after", type=Path, metavar="B", help="what to compare A with; the same kinds of input as for A"
    )
    parser.add_argument(
        "--fail-on",
        type=names,
        default=(),
        metavar="KINDS",
        help="exit with status 1 if there are differences of these kinds, separated by commas: came (signatures only "
        "in B), went (signatures only in A), counts (numbers of calls), shares (each signature's share of the time), "
        f"values (statistics of tensor values), operators (each operator's share of the time), or {ANY}",
    )
    parser.add_argument(
        "--counts",
        type=percent,
        metavar="PERCENT",
        help="ignore differences of call counts up to this percentage (default: 0, or 10%% with several traces)",
    )
    parser.add_argument(
        "--least",
        type=percent,
        metavar="PERCENT",
        help="ignore new and missing signatures, and changed call counts, with less than this share of the time "
        "(default: 0, or 0.1%% with several traces)",
    )
    parser.add_argument(
        "--share",
        type=percent,
        default=0.05,
        metavar="PERCENT",
        help="ignore a signature or operator whose share of the total time changed by at most this many percentage "
        "points (default: 5%%)",
    )
    parser.add_argument(
        "--spread",
        type=percent,
        default=0.1,
        metavar="PERCENT",
        help="ignore a change in the mean or spread of tensor values if it is at most this percentage of the spread "
        "(default: 10%%)",
    )
    add_top(parser, 30)
    add_output(parser, "write everything to a .json file, or the rows to a .md file")
    add_reading(parser)


@verb("trace diff", "compare two traces, or two sets of traces", DIFF_EXAMPLES, prepare_diff)
def run_diff(args: argparse.Namespace) -> int:
    from opgrip.traces.analysis.differences import compare_sides, load_side, paths_of, write_difference

    if strange := [kind for kind in args.fail_on if kind not in (*CHOICES, ANY)]:
        raise UserError(
            f"--fail-on {strange[0]} is not a kind of difference", f"choose from {', '.join((*CHOICES, ANY))}"
        )
    check_output(args.output, args.force, (".json", ".md"))
    paths = [paths_of(side) for side in (args.before, args.after)]
    before, after = (load_side(side, args.partial, args.unbounded) for side in paths)
    tolerances = _tolerances(args, is_several=max(map(len, paths)) > 1)
    difference = compare_sides(before, after, (str(args.before), str(args.after)), tolerances)
    _print_diff(difference, args.top)
    if args.output is not None:
        write_difference(difference, args.output, args.force)
        report_output(args, "the differences")
    kinds = CHOICES if ANY in args.fail_on else args.fail_on
    return int(any(difference.operators if kind == OPERATORS else difference.of_kind(kind) for kind in kinds))


def _tolerances(args: argparse.Namespace, is_several: bool) -> Tolerances:
    from opgrip.traces.analysis.differences import Tolerances

    counts = args.counts if args.counts is not None else SEVERAL_COUNTS * is_several
    least = args.least if args.least is not None else SEVERAL_LEAST * is_several
    return Tolerances(counts=counts, shares=args.share, values=args.spread, least=least)


def _print_diff(difference: TraceDifference, top: int) -> None:
    facts = []
    for name, *sides in difference.facts:
        texts = (printable(side if isinstance(side, str) else json.dumps(side, default=str)) for side in sides)
        facts.append((name, " → ".join(texts)))
    if difference.units != (1, 1):
        units = _pair(*(f"{int(units):,}" for units in difference.units))
        facts.append(("counted", f"per {difference.unit}; number of {difference.unit}s: {units}"))
    if difference.by_call:
        parts = "only operators, shapes, dtypes and numbers, because a file of another tool contains no more"
        facts.append(("compared", parts))
    changed = difference.changed
    counts = ", ".join(f"{kind} {len(difference.of_kind(kind)):,}" for kind in KINDS)
    facts.append(("signatures", f"{len(difference.rows):,}: {counts}"))
    for name, text in facts:
        print_line(f"{name:<12}{text}", sys.stdout, indent=12)
    if difference.operators:
        print()
        title = f"operators with a changed share ({len(difference.operators):,})"
        print_table(OPERATORS_MOVED, difference.operators[:top], sys.stdout, title)
    if not changed:
        return
    print()
    print_table(COLUMNS, changed[:top], sys.stdout, f"signatures that differ ({len(changed):,} in total)")


def _pair(one: str, other: str) -> str:
    return one if one == other else f"{one} → {other}"


def _values(row: Row) -> str:
    from opgrip.traces.analysis.differences import values_text

    return values_text(row)


COLUMNS = (
    TableColumn("what", lambda row: ", ".join(row.kinds), least=6),
    TableColumn("calls", lambda row: _pair(*(f"{count:,}" for count in row.counts)), ">"),
    TableColumn("share", lambda row: _pair(*(f"{share:.1%}" for share in row.shares)), ">"),
    TableColumn("median us", lambda row: _pair(*("-" if us is None else f"{us:,.1f}" for us in row.median_us)), ">", 1),
    TableColumn("call", "call", least=24, most=160),
    TableColumn("values", _values, rank=2, below=True),
)
OPERATORS_MOVED = (
    TableColumn("share of time", lambda row: _pair(*(f"{share:.1%}" for share in row.shares)), ">"),
    TableColumn("of calls", lambda row: _pair(*(f"{share:.1%}" for share in row.call_shares)), ">"),
    TableColumn("operator", "op", least=24),
)


VALIDATE_EXAMPLES = """\
examples:
  opgrip trace validate trace:faster_rcnn
  opgrip trace validate traces/*.jsonl.gz -o findings.json

exit status: 1 if a trace is invalid
"""


def prepare_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="a trace, or a file of another tool")
    add_top(parser, 50, "findings to show per trace")
    add_output(parser, "write all findings as JSON")
    parser.add_argument("--unbounded", action="store_true", help=UNBOUNDED_HELP)


@verb("trace validate", "check traces for errors", VALIDATE_EXAMPLES, prepare_validate)
def run_validate(args: argparse.Namespace) -> int:
    from opgrip.traces.analysis.validation import validate

    check_output(args.output, args.force)
    validations = []
    for path in args.traces:
        with Reporter(args.prog).reading(path):
            validations.append(validate(path, args.unbounded))
        _print_validate(validations[-1], args.top)
    if args.output is not None:
        write_json([item.as_json() for item in validations], args.output, args.force)
        report_output(args, "all findings")
    return int(any(item.counts for item in validations))


def _print_validate(validation: Validation, top: int) -> None:
    from opgrip.traces.analysis.validation import NOT_INSTALLED

    path = printable(validation.path)
    for finding in validation.findings[:top]:
        print(f"{path}: record {finding.record}: {finding.kind}: {printable(finding.message)}")
    total = sum(validation.counts.values())
    if total > top:
        print(f"{path}: and {total - top:,} other findings")
    for note in validation.notes:
        if note != NOT_INSTALLED:
            print(f"{path}: {printable(note)}", file=sys.stderr)
    unchecked = f" ({NOT_INSTALLED})" if NOT_INSTALLED in validation.notes else ""
    findings = counted(total, "finding") if total else "no findings"
    print(f"{path}: {counted(validation.records, 'record')}, {findings}{unchecked}")
