"""`opgrip trace trim` and `redact`: write a part of a trace, or a trace without private data."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.command import add_reading, counted, printable
from opgrip.cli.option_types import names
from opgrip.cli.output_files import check_output, check_writable, write_json
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.tools.verbs import add_filters, add_output, verb

if TYPE_CHECKING:
    from opgrip.traces.analysis.redaction import Policy
    from opgrip.traces.analysis.redaction.redaction import RedactedFile

TRIM_EXAMPLES = """\
examples:
  opgrip trace trim trace:faster_rcnn -o step.jsonl --steps 1
  opgrip trace trim trace:faster_rcnn -o head.jsonl --module 'roi_head*' --with-producers
  opgrip trace trim train.jsonl -o backward.jsonl.gz --phase backward --time 1.5s:2s

A call is kept if it meets all conditions, together with the calls inside it.
"""
NS_OF = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "": 10**9}


def prepare_trim(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    add_output(parser, "trace file to write", required=True)
    parser.add_argument(
        "--steps",
        type=steps,
        metavar="FIRST[:END]",
        help="keep only this step, or the steps from FIRST to END (excluded; to the last step if END is missing), "
        "counted from 0; such as 1, 0:2 or '2:'",
    )
    add_filters(parser, "keep only calls", "phase", "module", "op", "label")
    parser.add_argument(
        "--time",
        type=span,
        metavar="START:END",
        help="keep only calls that began in this interval, counted from the start of the trace; such as "
        "1.5s:2s, '100ms:' or ':20us'",
    )
    parser.add_argument(
        "--with-producers", action="store_true", help="also keep the calls that produced inputs of the kept calls"
    )
    add_reading(parser)


@verb(
    "trace trim",
    "write a part of a trace, selected by step, phase, module, operator, label or time",
    TRIM_EXAMPLES,
    prepare_trim,
)
def run_trim(args: argparse.Namespace) -> int:
    from opgrip.traces.analysis.trim import TracePart, trim

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


def steps(text: str) -> tuple[int, int | None]:
    """Return the first step, and the step after the last one, from a text such as `1`, `0:2` or `2:`."""
    match = re.fullmatch(r"(\d{1,9})|(\d{0,9}):(\d{0,9})", text.strip(), re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step such as 1 or a range such as 0:2")
    if match[1]:
        return int(match[1]), int(match[1]) + 1
    first, end = int(match[2] or 0), int(match[3]) if match[3] else None
    if end is not None and end <= first:
        raise argparse.ArgumentTypeError(f"{text!r} contains no step")
    return first, end


def span(text: str) -> tuple[int, int | None]:
    """Return start and end in ns for a text such as `1.5s:2s`."""
    first, colon, end = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not an interval such as 1.5s:2s")
    begin, until = _nanoseconds(first or "0"), _nanoseconds(end) if end else None
    if until is not None and until <= begin:
        raise argparse.ArgumentTypeError(f"{text!r} ends before it starts")
    return begin, until


def _nanoseconds(text: str) -> int:
    match = re.fullmatch(r"(-?\d{1,12}(?:\.\d{1,9})?)\s*(ns|us|ms|s|)", text.strip(), re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 1.5s or 20ms")
    return round(float(match[1]) * NS_OF[match[2]])


KEPT = ("modules", "functions", "files", "labels", "model", "scalars", "values")
REDACT_EXAMPLES = """\
examples:
  opgrip trace redact step.jsonl -o step.redacted.jsonl.zst
  opgrip trace redact step.jsonl -o out.jsonl --report left.json
  opgrip trace redact friday.jsonl -o out.jsonl --salt-file house.salt --keep modules,labels

Names of modules, functions, files, labels and models become hashes; values of numbers and tensors become defaults;
paths, command lines, times of day and unknown records are removed. Operators and shapes stay.
"""


def prepare_redact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    add_output(parser, "trace file to write", required=True)
    parser.add_argument(
        "--salt-file",
        type=Path,
        metavar="FILE",
        help="file with the salt for hashed names, created if missing; traces with the same salt can be compared "
        "(default: a new salt)",
    )
    parser.add_argument(
        "--keep", type=names, default=(), metavar="KINDS", help=f"kinds of names and values to keep: {','.join(KEPT)}"
    )
    parser.add_argument(
        "--hide-operators",
        action="store_true",
        help="also hash names of custom operators, which can then not be replayed",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write a JSON file that lists every text and exact value that stays in the trace",
    )
    add_reading(parser)


@verb("trace redact", "remove names, paths, texts and values from a trace", REDACT_EXAMPLES, prepare_redact)
def run_redact(args: argparse.Namespace) -> int:
    from opgrip.traces.analysis.redaction.redaction import redact
    from opgrip.traces.io.shipped_traces import trace_file

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
    from opgrip.traces.analysis.redaction import Policy, check_kept, salt_of

    unchanged = check_kept(args.keep)
    if args.salt_file is None:
        return Policy(keep=unchanged, hide_operators=args.hide_operators)
    return Policy(salt_of(args.salt_file), unchanged, args.hide_operators)


def _print_report(redacted: RedactedFile, args: argparse.Namespace, reporter: Reporter) -> None:
    from opgrip.display.tables import TableColumn, print_table
    from opgrip.traces.analysis.redaction.names import FORMAT

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
