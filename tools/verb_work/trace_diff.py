"""`opgrip trace diff` and `validate`: compare traces, and check that they conform to the format."""

from __future__ import annotations

import argparse
import json
import sys

from opgrip.cli.command import counted, printable
from opgrip.cli.output_files import check_output, write_json
from opgrip.cli.progress import Reporter
from opgrip.cli.terminal import print_line
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.tools.verbs import report_output
from opgrip.tools.verbs.trace_options import ANY
from opgrip.traces.analysis.differences import (
    SignatureRow,
    Tolerances,
    TraceDifference,
    compare_sides,
    load_side,
    paths_of,
    values_text,
    write_difference,
)
from opgrip.traces.analysis.validation import NOT_INSTALLED, Validation, validate

KINDS = ("came", "went", "counts", "shares", "values")
OPERATORS = "operators"  # word of `--fail-on` for changed shares of operators, whatever their shapes


CHOICES = (*KINDS, OPERATORS)


# default tolerances between sets of recordings, which differ by noise because their inputs differ
SEVERAL_COUNTS, SEVERAL_LEAST = 0.1, 0.001


def run_diff(args: argparse.Namespace) -> int:
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


def _values(row: SignatureRow) -> str:
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


def run_validate(args: argparse.Namespace) -> int:
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
