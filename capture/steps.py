"""Runs steps of a model under a capture, for the command and for Python."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opgrip.capture import full_values
from opgrip.capture.capture import Capture
from opgrip.capture.extensions import KNOWN_EXTENSIONS
from opgrip.capture.models import load_program
from opgrip.capture.options import GRIP_TO, Recording, check_grips
from opgrip.capture.program import ModelOptions, Program
from opgrip.traces.errors import UserError, one_line
from opgrip.traces.options import from_arguments
from opgrip.traces.output import check_writable
from opgrip.traces.progress import Reporter
from opgrip.traces.words import counted


def ignore_own_warnings() -> None:
    """Pass over the warnings at the end of a capture, which the caller tells in its own way."""
    for message in ("the trace .* could not be written", ".* was not gripped"):
        warnings.filterwarnings("ignore", message=message)


def check_capture(args: argparse.Namespace) -> None:
    """Raise `UserError` where a capture cannot be made, or written, as it is asked for."""
    check_grips(args)
    if args.output not in (None, "-"):
        check_writable(Path(args.output), args.force)
    if args.values == full_values.FULL:
        full_values.check(args.output, args.force)


def build(args: argparse.Namespace, reporter: Reporter) -> Program:
    """The model that is asked for, with the weights of the seed."""
    torch.manual_seed(args.seed)
    with reporter.doing(f"building {args.model}"):
        return load_program(args.model, from_arguments(ModelOptions, args))


def make_capture(
    args: argparse.Namespace, output: str, details: dict[str, Any], model: nn.Module | None = None
) -> Capture:
    """The capture that is asked for, which has not begun."""
    recording = asdict(from_arguments(Recording, args))
    extensions = (*KNOWN_EXTENSIONS, *recording.pop("extension"))
    recording["grip_to"] = recording["grip_to"] or GRIP_TO
    return Capture(output, model=model, extensions=extensions, details=details, force=args.force, **recording)


def capture_steps(program: Program, args: argparse.Namespace, reporter: Reporter) -> Capture:
    """Run the steps that warm up, and those that are captured; the capture has ended.

    Raises
    ------
    UserError : where a step fails; there is no trace then
    """
    model = {"name": program.name, "run": args.run, **program.details}
    settings = {"seed": args.seed, "warmup": args.warmup, "steps": args.steps, "device": args.device}
    capture = make_capture(args, args.output or f"{program.name}.jsonl", {"model": model, **settings}, program.model)
    total = args.warmup + args.steps
    with reporter.doing(f"running {args.warmup} warm-up and {counted(args.steps, 'captured step')}", total) as advance:
        inputs = warm_up(program, args, advance)
        with capture:
            while inputs:
                try:
                    run_step(program, inputs.pop())
                except UserError:
                    capture.discard()
                    raise
                advance()
    return capture


def warm_up(program: Program, args: argparse.Namespace, advance: Callable[[], None] = lambda: None) -> list[Any]:
    """Run the steps before those that are watched; gives the inputs of these, made where nobody watches."""
    for _ in range(args.warmup):
        run_step(program, program.inputs())
        advance()
    return [program.inputs() for _ in range(args.steps)]


def run_step(program: Program, inputs: object) -> None:
    """Run a step; `UserError` where it fails."""
    try:
        program.step(inputs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{program.name} fails in its step", one_line(error, 300)) from error


def check_written(capture: Capture) -> None:
    """Raise what kept the trace from being written."""
    if isinstance(capture.failure, BrokenPipeError):
        raise capture.failure
    if capture.failure is not None:
        raise UserError(f"{capture.path} could not be written", str(capture.failure))


def values_problem(capture: Capture) -> str | None:
    """Why whole values could not be written; None where they could, or were not asked for."""
    full = capture.full_values
    if full is None or full.failure is None:
        return None
    return f"whole values could not be written to {full.path.name}: {full.failure}"
