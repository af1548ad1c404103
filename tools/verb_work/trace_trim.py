"""`opgrip trace trim` and `redact`: write a part of a trace, or a trace without private data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

from opgrip.cli.command import counted, printable
from opgrip.cli.output_files import check_output, check_writable, write_json
from opgrip.cli.progress import Reporter
from opgrip.display.tables import TableColumn, print_table
from opgrip.errors import UserError
from opgrip.traces.analysis.redaction import Policy, check_kept, salt_of
from opgrip.traces.analysis.redaction.names import FORMAT
from opgrip.traces.analysis.redaction.redaction import RedactedFile, redact
from opgrip.traces.analysis.trim import TracePart, trim
from opgrip.traces.io.shipped_traces import trace_file


def run_trim(args: argparse.Namespace) -> int:
    check_writable(args.output, args.force)
    part = TracePart(args.steps, tuple(args.phase), tuple(args.module), tuple(args.op), args.time, tuple(args.label))
    with Reporter(args.prog).reading(args.trace):
        trimmed = trim(args.trace, args.output, part, args.with_producers, args.force, args.partial, args.unbounded)
    of_calls = f"{trimmed.calls:,} of {counted(trimmed.of_calls, 'call')}"
    of_signatures = f"{trimmed.signatures:,} of {counted(trimmed.of_signatures, 'signature')}"
    print(f"{args.prog}: wrote {of_calls}, {of_signatures}, to {args.output}", file=sys.stderr)
    if trimmed.producers:
        print(f"{args.prog}: {trimmed.producers:,} of these calls produce inputs for the others", file=sys.stderr)
    if trimmed.cut_edges:
        edges = counted(trimmed.cut_edges, "time")
        print(f"{args.prog}: {edges}, a kept call reads the result of a removed call", file=sys.stderr)
    return 0


def run_redact(args: argparse.Namespace) -> int:
    for path in (args.output, args.report):
        check_output(path, args.force)
    original = trace_file(args.trace)
    _check_apart(
        {"the trace": original, "the output": args.output, "the report": args.report, "the salt": args.salt_file}
    )
    policy = _policy(args)
    reporter = Reporter(args.prog)
    with reporter.reading(args.trace):
        redacted = redact(original, args.output, policy, args.force, args.partial, args.unbounded)
    _print_report(redacted, args, reporter)
    if args.report is not None:
        write_json(redacted.as_json(), args.report, args.force)
    return 0


def _check_apart(paths: Mapping[str, Path | None]) -> None:
    roles: dict[Path, str] = {}
    for role, path in paths.items():
        other = role if path is None else roles.setdefault(path.resolve(), role)
        if other != role:
            raise UserError(f"{path} is both {other} and {role}", f"name another file for {role}")


def _policy(args: argparse.Namespace) -> Policy:
    unchanged = check_kept(args.keep)
    if args.salt_file is None:
        return Policy(keep=unchanged, hide_operators=args.hide_operators)
    return Policy(salt_of(args.salt_file), unchanged, args.hide_operators)


def _print_report(redacted: RedactedFile, args: argparse.Namespace, reporter: Reporter) -> None:
    for name in redacted.whole_values:
        reporter.say(f"{printable(name)} contains the values and is not copied: do not share it")
    if redacted.missing is not None:
        reporter.say(printable(redacted.missing))
    passed_over = sum(redacted.passed_over.values())
    if passed_over:
        what = counted(passed_over, "record or field", "records or fields")
        reporter.say(f"{what} that this version of opgrip does not know were removed")
    rows = [row for row in redacted.report.rows() if row[3] != FORMAT]
    headings = ("where", "what", "different", "why it stays")
    columns = [
        TableColumn(heading, itemgetter(place), ",d" if heading == "different" else "", least=24)
        for place, heading in enumerate(headings)
    ]
    print_table(columns, rows, sys.stderr, "what is left")
    hashed = counted(len(redacted.report.hashes), "hash", "hashes")
    reporter.say(f"wrote {counted(redacted.calls, 'call')} to {args.output}; {hashed} replace names")
