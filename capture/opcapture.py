"""The command `opcapture`: runs a model, and writes what it ran to a trace."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout

from opgrip.capture.audit import Difference, audit
from opgrip.capture.capture import Capture
from opgrip.capture.options import LONGTAIL_STEPS, check_grips, check_not_for_models, make_parser
from opgrip.capture.own_cost import own_cost
from opgrip.capture.program import Program
from opgrip.capture.script import run_script, script_name
from opgrip.capture.steps import (
    build,
    capture_steps,
    check_capture,
    check_written,
    ignore_own_warnings,
    make_capture,
    run_step,
    values_problem,
    warm_up,
)
from opgrip.traces.ceilings.bandwidth import bandwidth_of
from opgrip.traces.command import USAGE_ERROR, run_command
from opgrip.traces.errors import UserError
from opgrip.traces.longtail import find_longtail, lines_of
from opgrip.traces.progress import Reporter
from opgrip.traces.trace import load

LONGTAIL_TOP = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; see `opcapture --help`."""
    own_arguments, has_program, program = _split(sys.argv[1:] if argv is None else list(argv))
    return run_command(make_parser(), lambda args: run(args, program if has_program else None), own_arguments)


def _split(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    """What stands before and after `--`, and whether there is one."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], place < len(argv), argv[place + 1 :]


def run(args: argparse.Namespace, program: Sequence[str] | None) -> int:
    """Capture a script, or load a model, warm it up and capture it."""
    reporter = Reporter("opcapture")
    return _run_script(args, program, reporter) if program is not None else _run_model(args, reporter)


def _run_script(args: argparse.Namespace, arguments: Sequence[str], reporter: Reporter) -> int:
    check_not_for_models(args)
    check_grips(args)
    if args.output == "-":
        raise UserError("a script's own output goes to stdout", "name a file for the trace with --output")
    capture = make_capture(args, args.output or f"{script_name(arguments)}.jsonl", {"script": list(arguments)})
    with warnings.catch_warnings():
        ignore_own_warnings()
        with capture:
            status = run_script(arguments, capture.grips.script_compiler())
    if capture.failure is None:
        _tell(capture, reporter)
        problem = values_problem(capture)
    else:
        problem = f"{capture.path} could not be written: {capture.failure}"
    if problem:
        reporter.say(f"error: {problem}")
    elif args.find_longtail:
        # the script's own output went to stdout
        print("\n".join(_longtail(capture)), file=sys.stderr)
    return status or (USAGE_ERROR if problem else 0)


def _run_model(args: argparse.Namespace, reporter: Reporter) -> int:
    for name in ("audit", "find_longtail"):
        if getattr(args, name) and args.output == "-":
            raise UserError(f"--{name.replace('_', '-')} reads the trace again", "name a file with --output")
    args.steps = args.steps or (LONGTAIL_STEPS if args.find_longtail else 1)
    check_capture(args)
    # what models print is not what was asked for
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        ignore_own_warnings()
        capture = capture_steps(build(args, reporter), args, reporter)
        check_written(capture)
        _tell(capture, reporter)
        if problem := values_problem(capture):
            raise UserError(problem)
        if args.audit:
            _tell_audit(_audit(build(args, reporter), capture, args, reporter), reporter)
    if args.find_longtail:
        print("\n".join(_longtail(capture)))
    return 0


def _audit(program: Program, capture: Capture, args: argparse.Namespace, reporter: Reporter) -> list[Difference]:
    with reporter.doing("auditing"):
        inputs = warm_up(program, args)

        def steps() -> None:
            while inputs:
                run_step(program, inputs.pop())

        return audit(capture.path, steps)


def _tell_audit(differences: list[Difference], reporter: Reporter) -> None:
    unexplained = [item for item in differences if item.explained is None]
    for item in differences:
        reporter.say(
            f"audit: {item.op}: torch counts {item.torch_calls:,}, the trace {item.trace_calls:,}: "
            f"{item.explained or 'NOT EXPLAINED'}"
        )
    reporter.say(f"audit: {len(differences)} operators differ, {len(unexplained)} without an explanation")


def _tell(capture: Capture, reporter: Reporter) -> None:
    size = f"{capture.bytes_written / 1000:,.0f} kB"
    where = "stdout" if str(capture.path) == "-" else str(capture.path)
    reporter.say(f"{capture.calls:,} calls of {capture.signatures:,} signatures, {size}, to {where}")
    if capture.dropped:
        reporter.say(f"{capture.dropped:,} calls could not be recorded; `opgrip trace info {where}` says why")
    if (full := capture.full_values) is not None and full.failure is None:
        size = f"{full.bytes_written / 1000:,.0f} kB"
        reporter.say(f"whole values of {full.tensors:,} tensors, {size}, to {full.path.name}: they can be private data")
    for folder in capture.grips.written:
        reporter.say(f"a sample in {folder}: run it with pytest")
    for name, reason in capture.grips.refused.items():
        reporter.say(f"{name} was not gripped: {reason}")
    if where != "stdout":
        reporter.say(f"run them again with: opreplay {where}")


def _longtail(capture: Capture) -> list[str]:
    return lines_of(find_longtail([load(capture.path, unbounded=True)], bandwidth_of, own_cost()), LONGTAIL_TOP)
