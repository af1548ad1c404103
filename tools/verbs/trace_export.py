"""`opgrip trace export-case`: writes a call, module, function or gripped sample as a Python script."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from opgrip.cli.command import add_reading
from opgrip.cli.option_types import Cut
from opgrip.cli.options import add_options, from_arguments
from opgrip.cli.output_files import check_writable, whole_file
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.tools.verbs import add_output, report_output, verb

CALL, UNITS = "call", ("call", "module", "function")
MODE = re.compile(r"eager|compile(-dynamic)?(:[A-Za-z0-9_]+)?")
EXAMPLES = """\
examples:
  opgrip trace export-case trace:faster_rcnn 17 -o case.py && python case.py
  opgrip trace export-case step.jsonl 17 --mode compile -o case.py        compares the compiled call with eager
  opgrip trace export-case step.jsonl blocks.0 --unit module --mode compile -o repro.py
  opgrip trace export-case step.jsonl 'blocks.0 backward' --unit module --mode compile:aot_eager -o repro.py
  opgrip trace export-case grips/Block_forward 0 --mode compile -o repro.py     from source, kept by opcapture --grip
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="a trace, a file of another tool, or a folder of a gripped sample"
    )
    parser.add_argument(
        "case",
        metavar="CASE",
        help="number of the case in opreplay --list; with --unit, name of the module or function as in the rows of "
        "opreplay; for a sample, number of its call, from 0",
    )
    parser.add_argument(
        "--unit",
        choices=UNITS,
        default=CALL,
        help="one call, or the recorded operators of a module or function as one function (default: %(default)s)",
    )
    parser.add_argument(
        "--mode",
        type=_mode,
        default="eager",
        metavar="MODE",
        help="mode in which the script also runs it: eager, compile, compile-dynamic or compile:BACKEND "
        "(default: %(default)s)",
    )
    add_output(parser, ".py file to write", required=True)
    add_options(parser, Cut)
    add_reading(parser)


def _mode(text: str) -> str:
    if MODE.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not eager, compile, compile-dynamic or compile:BACKEND")
    return text


@verb("trace export-case", "write a case as a Python script that only needs torch", EXAMPLES, prepare)
def run(args: argparse.Namespace) -> int:
    from opgrip.tools.exports.exported_cases import export_case, export_sample, export_unit
    from opgrip.traces import TraceReader, load
    from opgrip.traces.io.sample_folder import SAMPLE, read_sample

    if args.output.suffix != ".py":
        raise UserError(f"{args.output} is not a Python file", "use the suffix .py")
    check_writable(args.output, args.force)
    if (args.trace / SAMPLE).is_file():
        what, source = export_sample(read_sample(args.trace), _number(args.case), args.mode)
    else:
        number = _number(args.case) if args.unit == CALL else 0
        with Reporter(args.prog).reading(args.trace):
            reader = TraceReader(args.trace, args.unbounded, cut=from_arguments(Cut, args))
            trace = load(args.trace, args.partial, args.unbounded, reader)
        if args.unit == CALL:
            what, source = f"signature {number}", export_case(trace, number, args.mode)
        else:
            what, source = export_unit(trace, args.case, args.unit, args.mode)
    with whole_file(args.output, args.force) as file:
        file.write(source.encode())
    report_output(args, what)
    print(f"{args.prog}: run it with: python {args.output}", file=sys.stderr)
    return 0


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise UserError(f"{text[:40]!r} is not the number of a case", "see opreplay --list, or add --unit module")
    return int(text)
