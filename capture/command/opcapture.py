"""The command `opcapture`: run a model, write its trace, and report what was recorded."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from time import perf_counter_ns
from typing import IO, TYPE_CHECKING

import numpy as np
import torch

from opgrip.capture.command.capture_options import SCRIPT, check_not_for_models
from opgrip.capture.command.model_steps import (
    build,
    capture_of,
    capture_steps,
    check_capture,
    check_written,
    ignore_own_warnings,
    make_capture,
    output_of,
    run_step,
    values_problem,
    warm_up,
)
from opgrip.capture.command.script import run_script, script_name
from opgrip.capture.models.program import ModelProgram
from opgrip.capture.session.capture import Capture
from opgrip.cli.command import INTERRUPTED, USAGE_ERROR, counted
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.platform.machine import measure_once

if TYPE_CHECKING:
    from opgrip.capture.command.audit import CountDifference
    from opgrip.traces.analysis.longtail import CaptureCost

MOST_NAMES = 4  # maximum number of files or operators that are listed by name; the others are only counted


def closing_lines(capture: Capture, interrupted: bool = False) -> Iterator[str]:
    where = "stdout" if str(capture.path) == "-" else str(capture.path)
    if capture.keeps_last:
        for path in capture.dumps:
            yield f"the last calls before an event, such as an error or a signal, to {_shown(capture, path)}"
        if not capture.dumps:
            yield "the program ended without an error, and no dump was requested: the last calls were not written"
    elif capture.calls or capture.dropped:
        ending = " (interrupted)" if interrupted else ""
        size = f"{capture.bytes_written / 1000:,.0f} kB"
        counts = f"{counted(capture.calls, 'call')} of {counted(capture.signatures, 'signature')}"
        yield f"{counts}, {size}, to {where}{ending}"
    elif capture.child_files or capture.cut_child_files:
        yield f"the main process called no operator{' (interrupted)' if interrupted else ''}"
    elif interrupted:
        yield "interrupted before a call was recorded: no trace was written"
    else:
        yield "no operator was called: no trace was written"
    if capture.stopped:
        yield f"the recording ended at the limit of {capture.stopped}: later calls of the program are missing"
    if capture.dropped:
        advice = "" if capture.keeps_last and not capture.dumps else f"; `opgrip trace info {where}` says why"
        yield f"{counted(capture.dropped, 'call')} could not be recorded{advice}"
    full = capture.full_values
    if full is not None and full.failure is None and capture.calls:
        size = f"{full.bytes_written / 1000:,.0f} kB"
        yield f"full values of {full.tensors:,} tensors, {size}, to {full.path.name}: they can be private data"
    if operators := capture.custom_operators:
        yield (
            f"names of custom operators are not hidden, because a replay needs them: {_listed_names(operators)}; "
            "`opgrip trace redact` can hide them"
        )
    yield from _child_lines(capture)
    for folder in capture.grips.written:
        yield f"a sample in {folder}: run it with pytest"
    yield from capture.notes()
    yield from capture.remarks()
    if capture.calls:
        yield from capture.doubts
    if capture.calls and where != "stdout":
        yield f"run them again with: opreplay {_shown(capture, capture.dumps[-1]) if capture.dumps else where}"


def _shown(capture: Capture, path: Path) -> Path:
    return Path(capture.path).with_name(path.name)


def _child_lines(capture: Capture) -> Iterator[str]:
    children, old = capture.child_files, capture.old_child_files
    if old:
        yield f"removed files of an earlier run, because of --force: {_names(old)}"
    if cut := capture.cut_child_files:
        were = "a process that was killed" if len(cut) == 1 else f"{len(cut)} processes that were killed"
        yield f"calls of {were}, to {_names(cut)}: read them with --partial"
    if not children:
        return
    processes = "a process" if len(children) == 1 else f"{len(children)} processes"
    yield f"calls of {processes} that the program started, to {_names(children)}"
    if not capture.calls:
        yield f"run them again with: opreplay {_shown(capture, children[0])}"
    else:
        yield f"`opgrip trace merge` makes one trace of these and {Path(capture.path).name}"


def _names(files: Sequence[Path]) -> str:
    return _listed_names([file.name for file in files])


def _listed_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return shown if len(names) <= MOST_NAMES else f"{shown} and {len(names) - MOST_NAMES} more"


LONGTAIL_TOP = 30


def run(args: argparse.Namespace, program: Sequence[str] | None) -> int:
    """Capture a script, or build, warm up and capture a model; return the exit status."""
    reporter = Reporter("opcapture")
    return _run_script(args, program, reporter) if program is not None else _run_model(args, reporter)


def _run_script(args: argparse.Namespace, arguments: Sequence[str], reporter: Reporter) -> int:
    check_not_for_models(args)
    if args.output == "-":
        raise UserError(
            "with a script, the trace cannot go to stdout, because the script's output does",
            ("name a file for the trace with --output"),
        )
    args.output = output_of(args, script_name(arguments))
    check_capture(args)
    capture, process = make_capture(args, args.output, {"script": list(arguments)}), os.getpid()
    with warnings.catch_warnings():
        ignore_own_warnings()
        status, interrupted = _run_in(capture, arguments)
    if os.getpid() != process:
        # a fork that came to the script's end: its parent reports its trace
        return status
    problem: object = capture.problem
    if problem is None:
        _report(capture, reporter, interrupted)
        problem = values_problem(capture)
    if problem:
        reporter.say(f"error: {problem}")
    elif args.find_longtail and capture.calls:
        # the script's own output went to stdout
        _print_longtail(capture, sys.stderr)
    return status or (USAGE_ERROR if problem else 0)


def _run_in(capture: Capture, arguments: Sequence[str]) -> tuple[int, bool]:
    with capture:
        capture.discard(if_empty=True)
        try:
            return run_script(arguments, capture.grips.script_compiler(), capture.note_error), False
        except KeyboardInterrupt as error:
            capture.note_error(error)
            return INTERRUPTED, True
        except UserError:
            capture.discard()
            raise


def _run_model(args: argparse.Namespace, reporter: Reporter) -> int:
    if args.last is not None:
        raise UserError("--last is for scripts, not for --model", SCRIPT)
    for name in ("audit", "find_longtail"):
        if getattr(args, name) and args.output == "-":
            raise UserError(f"--{name.replace('_', '-')} needs a trace in a file", "name one with --output")
    check_capture(args, args.device)
    # models' own output goes to stderr
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        ignore_own_warnings()
        program = build(args, reporter)
        if args.output is None:
            # the name depends on the program; refuse an existing file before the warm-up
            args.output = output_of(args, program.name)
            check_capture(args, args.device)
        capture = capture_of(program, args)
        try:
            capture_steps(capture, program, args, reporter)
        except KeyboardInterrupt:
            _report(capture, reporter, interrupted=True)
            return INTERRUPTED
        check_written(capture)
        _report(capture, reporter)
        for line in program.finish():
            reporter.say(line)
        if problem := values_problem(capture):
            raise UserError(problem)
        if args.audit:
            _report_audit(_audit(build(args, reporter), capture, args, reporter), reporter)
    if args.find_longtail:
        _print_longtail(capture, sys.stdout)
    return 0


def _audit(
    program: ModelProgram, capture: Capture, args: argparse.Namespace, reporter: Reporter
) -> list[CountDifference]:
    from opgrip.capture.command.audit import audit

    with reporter.doing("auditing"):
        inputs = warm_up(program, args)

        def steps() -> None:
            while inputs:
                run_step(program, inputs.pop())

        return audit(capture.path, steps)


def _report_audit(differences: list[CountDifference], reporter: Reporter) -> None:
    unexplained = [item for item in differences if item.explained is None]
    for item in differences:
        reporter.say(
            f"audit: {item.op}: torch counts {item.torch_calls:,}, the trace {item.trace_calls:,}: "
            f"{item.explained or 'NOT EXPLAINED'}"
        )
    differ = counted(len(differences), "operator differs", "operators differ")
    reporter.say(f"audit: {differ}, {len(unexplained)} without an explanation")


def _report(capture: Capture, reporter: Reporter, interrupted: bool = False) -> None:
    for line in closing_lines(capture, interrupted):
        reporter.say(line)


def _print_longtail(capture: Capture, file: IO[str]) -> None:
    # pandas must not delay the start of a recorded program
    from opgrip.traces.analysis.longtail import bandwidth_of, find_longtail, print_longtail
    from opgrip.traces.table.trace import load

    longtail = find_longtail([load(capture.path, unbounded=True)], bandwidth_of, own_cost())
    print_longtail(longtail, LONGTAIL_TOP, file)


BLOCKS, ROUNDS, WARMUP = 6, 50, 30
LOW = 0.25  # quantile of the measured times; a low one, because other work on the machine only makes times longer


def own_cost() -> CaptureCost:
    """Return the time that recording adds to a repeated call, measured now or earlier on this machine."""
    from opgrip.traces.analysis.longtail import CaptureCost

    operator_ns, between_ns = measure_once("cost of capture", "cpu", _measure)
    return CaptureCost(operator_ns, between_ns)


@torch.no_grad()
def _measure() -> tuple[float, float]:
    boxes = torch.rand(16, 4)
    for _ in range(WARMUP):
        _small_operators(boxes)
    operator_ns, between_ns = np.median([_measure_block(boxes) for _ in range(BLOCKS)], axis=0)
    return float(operator_ns), float(between_ns)


def _measure_block(boxes: torch.Tensor) -> tuple[float, float]:
    from opgrip.traces.table.trace import load

    plain = [_time(boxes) for _ in range(ROUNDS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loop.jsonl"
        with Capture(path):
            for _ in range(WARMUP + ROUNDS):
                _small_operators(boxes)
        calls = load(path).calls
    count = len(calls) // (WARMUP + ROUNDS)
    starts = calls["start_ns"].to_numpy()[WARMUP * count :].reshape(-1, count)
    durations = calls["duration_ns"].to_numpy()[WARMUP * count :].reshape(-1, count)
    # from the first start to the last, with one gap for each operator
    spans = (starts[:, -1] - starts[:, 0]) / (count - 1)
    without = float(np.quantile(plain, LOW)) / count
    inside = float(np.quantile(durations.mean(axis=1), LOW))
    operator_ns = max(0.0, inside - without)
    return operator_ns, max(0.0, float(np.quantile(spans, LOW)) - without - operator_ns)


def _time(boxes: torch.Tensor) -> int:
    start = perf_counter_ns()
    _small_operators(boxes)
    return perf_counter_ns() - start


def _small_operators(boxes: torch.Tensor) -> torch.Tensor:
    corners, sizes = boxes[:, :2], boxes[:, 2:]
    centers = (corners + sizes) * 0.5
    sizes = (sizes - corners).abs().clamp(min=0.1)
    scaled = centers * sizes + corners
    return torch.cat([scaled - sizes, scaled + sizes], dim=1).view(-1, 4)
