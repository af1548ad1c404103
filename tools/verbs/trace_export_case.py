"""`opgrip trace export-case`: one call of a trace as a Python file that needs only torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.case_slices import Cut
from opgrip.cli.command import add_debug, add_reading, not_negative
from opgrip.cli.options import add_options, from_arguments
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.tools.verbs.verb import Verb, verbs

if TYPE_CHECKING:
    from opgrip.replay.cases.cases import Case
    from opgrip.traces import Trace

EXAMPLES = """\
examples:
  opgrip trace export-case trace:faster_rcnn 17 -o case.py && python case.py
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    """Add the options of the verb."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a file of another tool")
    parser.add_argument("number", type=not_negative, metavar="N", help="number of the signature, as opreplay shows it")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the .py to write")
    parser.add_argument("-f", "--force", action="store_true", help="replace an existing file")
    add_options(parser, Cut)
    add_reading(parser, "take what there is of a cut or damaged trace")
    add_debug(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file."""
    from opgrip.cli.output_files import check_writable, whole_file
    from opgrip.traces import TraceReader, load

    if args.output.suffix != ".py":
        raise UserError(f"{args.output} is no name of a Python file", "end it in .py")
    check_writable(args.output, args.force)
    with Reporter(args.prog).reading(args.trace):
        reader = TraceReader(args.trace, args.unbounded, cut=from_arguments(Cut, args))
        trace = load(args.trace, args.partial, args.unbounded, reader)
    source = export_case(trace, args.number)
    with whole_file(args.output, args.force) as file:
        file.write(source.encode("ascii"))
    print(f"{args.prog}: signature {args.number} to {args.output}: run it with python", file=sys.stderr)
    return 0


def export_case(trace: Trace, number: int) -> str:
    """Return the source of the file.

    Raises
    ------
    UserError : if no call of the trace has the signature, or if running it needs more than torch
    """
    from opgrip.replay.cases.cases import make_cases

    case = next((case for case in make_cases(trace) if case.trace_number == number), None)
    if case is None:
        raise UserError(f"no call of the trace has the signature {number}", "opgrip trace info names some")
    return source_of(trace, case)


def source_of(trace: Trace, case: Case) -> str:
    """Return the source of a case's file; see `export_case`."""
    from opgrip.replay.inputs.input_options import with_defaults
    from opgrip.replay.operators.lookup import Unsupported, find_operator
    from opgrip.traces.scripts import script_of

    signature = next(item for item in trace.signatures if item.number == case.trace_number)
    try:
        find_operator(signature, extensions=())
    except Unsupported as error:
        raise UserError(f"{signature.op} cannot stand in a script", str(error)) from error
    signature, values = with_defaults(signature, trace.values)
    return script_of(signature, values, case.context, list(_facts(trace, case)))


def _facts(trace: Trace, case: Case) -> list[str]:
    from opgrip.cli.command import counted

    model = trace.header.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    origin = f" of {name}" if isinstance(name, str) else ""
    took = f", {case.captured_us:,.1f} us each (median)" if case.captured_us else ""
    from opgrip.replay.cases.call_sites import module_of

    module = module_of(case.call_sites)
    where = f" in {module}" if module else ""
    torch = trace.header.get("torch")
    return [
        f"signature {case.trace_number}{origin}: {counted(case.count, 'call')}{where}, {case.phase}{took}",
        *([f"captured with torch {torch}"] if isinstance(torch, str) else []),
    ]


verbs.register("trace export-case")(
    Verb("write one call as a Python file that needs torch alone", EXAMPLES, prepare, run)
)
