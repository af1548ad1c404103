"""Runs steps of a model under a capture, for the command and for Python."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opgrip.capture.command.capture_options import OPTIONS, Recording, check_grips
from opgrip.capture.models import load_program, source_of
from opgrip.capture.models.program import ModelOptions, OperatorOptions, Program
from opgrip.capture.program.capture_choices import FULL, GRIPS, KERNELS, KNOWN_EXTENSIONS, OUTPUT
from opgrip.capture.program.processes import own_path
from opgrip.capture.session.capture import Capture
from opgrip.capture.session.schedule import ALWAYS, Schedule
from opgrip.capture.signatures import full_values
from opgrip.capture.timing.device_time import check_kernels
from opgrip.cli.command import counted
from opgrip.cli.options import from_arguments, refuse_options
from opgrip.cli.output_files import check_writable, reason_of
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError, cause_of

MOST_LEARNED = 2
"""Of the steps that warm up, those that are watched: what is new in one is looked at again in the next."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""How the names of traces end."""


def ignore_own_warnings() -> None:
    """Pass over the warnings at the end of a capture, which the caller tells in its own way."""
    for message in ("the trace .* could not be written", ".* was not gripped", "the extension .* was not recorded"):
        warnings.filterwarnings("ignore", message=message)


def check_capture(args: argparse.Namespace, device: str | None = None) -> None:
    """Raise `UserError` where a capture cannot be made, or written, as it is asked for.

    Parameters
    ----------
    device : that the program runs on, where it is known
    """
    check_grips(args)
    output = None if args.output is None else own_path(args.output)
    if output is not None and str(output) != "-":
        check_writable(Path(output), args.force)
        if not str(output).endswith(SUFFIXES):
            raise UserError(f"{output} is no name of a trace", f"end it in {', '.join(SUFFIXES)}")
    if args.device_time == KERNELS:
        check_kernels(device)
    if args.values == FULL:
        full_values.check(output, args.force)


def build(args: argparse.Namespace, reporter: Reporter) -> Program:
    """The model that is asked for, with the weights of the seed."""
    source = source_of(args.model)
    refuse_options(args, OPTIONS, source.lacks, source.hint)
    torch.manual_seed(args.seed)
    options = replace(from_arguments(ModelOptions, args), operators=from_arguments(OperatorOptions, args))
    with reporter.doing(f"building {args.model}", measures=False):
        program = load_program(args.model, options)
    if program.steps is not None:
        args.warmup, args.steps = 0, program.steps
    return program


def make_capture(
    args: argparse.Namespace,
    output: str,
    details: dict[str, Any],
    model: nn.Module | None = None,
    schedule: Schedule = ALWAYS,
) -> Capture:
    """The capture that is asked for, which has not begun."""
    recording = asdict(from_arguments(Recording, args))
    extensions = (*KNOWN_EXTENSIONS, *recording.pop("extension"))
    recording["grip_to"] = (recording["grip_to"] or Path(GRIPS)) if recording["grip"] else None
    recording |= {"extensions": extensions, "details": details, "force": args.force}
    return Capture(output, model=model, schedule=schedule, **recording)


def output_of(args: argparse.Namespace, name: str) -> str:
    """Where the trace of a script or model goes."""
    default = OUTPUT if args.private else f"{name}.jsonl"
    return args.output or default


def capture_of(program: Program, args: argparse.Namespace) -> Capture:
    """The capture of a program's steps, which has not begun."""
    model = {"name": program.name, "run": args.run, **program.details}
    settings = {"seed": args.seed, "warmup": args.warmup, "steps": args.steps, "device": args.device}
    learned = min(args.warmup, MOST_LEARNED)
    schedule = Schedule(warmup=learned, active=args.steps) if learned else ALWAYS
    return make_capture(args, output_of(args, program.name), {"model": model, **settings}, program.model, schedule)


def capture_steps(capture: Capture, program: Program, args: argparse.Namespace, reporter: Reporter) -> None:
    """Run the steps that warm up, in the last two of which the capture learns, and those that it records; it ends then.

    Raises
    ------
    UserError : where a step fails, or calls no operator; there is no trace then
    """
    total, learned = args.warmup + args.steps, capture.schedule.warmup
    doing = f"running {args.warmup} warm-up and {counted(args.steps, 'recorded step')}"
    if program.steps is not None:
        doing = f"running {program.name}, {counted(total, 'step')}"
    with reporter.doing(doing, total) as advance:
        inputs = warm_up(program, args, advance, learned)
        with capture:
            capture.discard(if_empty=True)
            while inputs:
                try:
                    run_step(program, inputs.pop())
                except UserError:
                    capture.discard()
                    raise
                advance()
                if len(inputs) >= args.steps:
                    capture.step()
    if not capture.calls and not capture.dropped and capture.failure is None:
        raise UserError(f"{program.name} called no operator", "there is nothing to replay")


def warm_up(
    program: Program, args: argparse.Namespace, advance: Callable[[], None] = lambda: None, learned: int = 0
) -> list[Any]:
    """Run the steps before those that are watched; gives the inputs of these, made where nobody watches.

    Parameters
    ----------
    learned : how many steps are watched, and not recorded
    """
    for _ in range(args.warmup - learned):
        run_step(program, program.inputs())
        advance()
    return [program.inputs() for _ in range(learned + args.steps)]


def run_step(program: Program, inputs: object) -> None:
    """Run a step; `UserError` where it fails."""
    try:
        program.step(inputs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{program.name} fails in its step", cause_of(error)) from error


def check_written(capture: Capture) -> None:
    """Raise what kept the trace from being written."""
    if isinstance(capture.failure, BrokenPipeError):
        raise capture.failure
    if capture.problem is not None:
        raise capture.problem


def values_problem(capture: Capture) -> str | None:
    """Why whole values could not be written; None where they could, or were not asked for."""
    full = capture.full_values
    if full is None or full.failure is None:
        return None
    return f"whole values could not be written to {full.path.name}: {reason_of(full.failure)}"
