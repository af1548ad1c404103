"""`opgrip candidate init`: a file in which to implement an operator or a module."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from opgrip.cli.command import add_reading
from opgrip.cli.output_files import check_output, whole_file
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.replay.operators.admission import extension_of
from opgrip.tools.verbs import add_output, report_output, verb

EXAMPLES = """\
examples:
  opgrip candidate init aten._softmax.default step.jsonl -o softmax.py
  opgrip candidate init own.half.default step.jsonl --extension own_ops.py -o half.py
  opgrip candidate init sample:delta2bbox -o delta2bbox.py
  opgrip candidate init grips/soft_nms -o soft_nms.py
  opgrip candidate init module:backbone.layer1.1 trace:faster_rcnn -o block.py
"""


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "operator",
        metavar="OPERATOR",
        help="full name of an operator in the trace, module:PATH for a module, sample:NAME for a shipped sample, or a "
        "folder that opgrip grip wrote",
    )
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="a trace; omit it for a sample")
    parser.add_argument(
        "--extension",
        action="append",
        default=[],
        type=extension_of,
        metavar="MODULE|FILE",
        help="module or file to import, which registers the operator; can be repeated",
    )
    add_output(parser, ".py file to write", required=True)
    add_reading(parser)


@verb(
    "candidate init",
    "write a Python file from which to start your own implementation of an operator",
    EXAMPLES,
    prepare,
)
def run(args: argparse.Namespace) -> int:
    is_sample = args.operator.startswith("sample:") or Path(args.operator).is_dir()
    if is_sample != (args.trace is None):
        what = f"{args.operator} takes no trace" if is_sample else "a trace is missing"
        raise UserError(what, "opgrip candidate init OPERATOR TRACE, or a sample without a trace")
    check_output(args.output, args.force, (".py", ".pyw"))

    from opgrip.replay.modes.candidate import OF_MODULES
    from opgrip.tools.exports.candidate_template import file_of_module, file_of_operator, file_of_sample
    from opgrip.traces import TraceReader, load

    reporter = Reporter(args.prog)
    if is_sample:
        template = file_of_sample(args.operator)
    else:
        with reporter.reading(args.trace):
            trace = load(args.trace, args.partial, args.unbounded, TraceReader(args.trace, args.unbounded))
        if args.operator.startswith(OF_MODULES):
            path = args.operator.removeprefix(OF_MODULES)
            template = file_of_module(trace, str(args.trace), path)
        else:
            template = file_of_operator(trace, str(args.trace), args.operator, args.extension)
    with whole_file(args.output, args.force) as file:
        file.write(template.text(args.output).encode())
    report_output(args, f"a function to replace by an implementation of {args.operator}")
    print(f"{args.prog}: judge it with: {template.command(args.output)}", file=sys.stderr)
    return 0
