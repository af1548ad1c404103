"""Capture of a model's steps, for `opcapture` and for Python programs."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from opgrip.capture.command.capture_options import (
    OPTIONS,
    ModelName,
    OnDemandOptions,
    RecordingOptions,
    Steps,
    check_grips,
    make_parser,
)
from opgrip.capture.models import load_program, source_of
from opgrip.capture.models.factory import program_of
from opgrip.capture.models.program import ModelProgram, under_autocast
from opgrip.capture.models.sources import ModelOptions, OperatorOptions
from opgrip.capture.program.capture_choices import FULL, GRIPS, KERNELS, KNOWN_EXTENSIONS, OUTPUT
from opgrip.capture.program.processes import own_path
from opgrip.capture.session.capture import Capture
from opgrip.capture.session.schedule import ALWAYS, Schedule
from opgrip.capture.signatures import full_values
from opgrip.capture.timing.kernel_times import check_kernels
from opgrip.cli.command import counted
from opgrip.cli.options import all_from_arguments, arguments_of, from_arguments, refuse_options, words_in
from opgrip.cli.output_files import check_writable, reason_of
from opgrip.cli.progress import QuietReporter, Reporter
from opgrip.errors import UserError, cause_of, in_words_of_python, place_of

if TYPE_CHECKING:
    from opgrip.traces.table.trace import Trace

MOST_LEARNED = 2  # maximum number of warm-up steps in which the capture examines calls without recording them
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")  # suffixes of trace files


def ignore_own_warnings() -> None:
    for message in ("the trace .* could not be written", ".* was not gripped", "the extension .* was not recorded"):
        warnings.filterwarnings("ignore", message=message)


def check_capture(args: argparse.Namespace, device: str | None = None) -> None:
    check_grips(args)
    output = None if args.output is None else own_path(args.output)
    if output is not None and str(output) != "-":
        check_writable(Path(output), args.force)
        if not str(output).endswith(SUFFIXES):
            raise UserError(
                f"{output} is not a valid name of a trace file", f"choose a name that ends in {', '.join(SUFFIXES)}"
            )
    if args.device_time == KERNELS:
        check_kernels(device)
    if args.values == FULL:
        full_values.check(output, args.force)


def build(args: argparse.Namespace, reporter: Reporter) -> ModelProgram:
    """Seed torch with `--seed`, and build the model that the options select."""
    source = source_of(args.model)
    refuse_options(all_from_arguments(OPTIONS, args), source.lacks, source.hint)
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
    recording = asdict(from_arguments(RecordingOptions, args))
    extensions = (*KNOWN_EXTENSIONS, *recording.pop("extension"))
    recording["grip_to"] = (recording["grip_to"] or Path(GRIPS)) if recording["grip"] else None
    recording |= {"extensions": extensions, "details": details, "force": args.force}
    return Capture(output, model=model, schedule=schedule, **recording)


def output_of(args: argparse.Namespace, name: str) -> str:
    default = OUTPUT if args.private else f"{name}.jsonl"
    return args.output or default


def capture_of(program: ModelProgram, args: argparse.Namespace) -> Capture:
    model = {"name": program.name, "run": args.run, **program.details}
    settings = {"seed": args.seed, "warmup": args.warmup, "steps": args.steps, "device": args.device}
    learned = min(args.warmup, MOST_LEARNED)
    schedule = Schedule(warmup=learned, active=args.steps) if learned else ALWAYS
    output = output_of(args, program.name)
    return make_capture(args, output, {"model": model, **settings}, program.model, schedule)


def capture_steps(capture: Capture, program: ModelProgram, args: argparse.Namespace, reporter: Reporter) -> None:
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
        raise UserError(
            f"{program.name} called no operator, so there is nothing to record", "check that it computes with tensors"
        )


def warm_up(
    program: ModelProgram, args: argparse.Namespace, advance: Callable[[], None] = lambda: None, learned: int = 0
) -> list[Any]:
    for _ in range(args.warmup - learned):
        run_step(program, program.inputs())
        advance()
    return [program.inputs() for _ in range(learned + args.steps)]


def run_step(program: ModelProgram, inputs: object) -> None:
    try:
        program.step(inputs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{program.name} fails while it runs a step{place_of(error)}", cause_of(error)) from error


def check_written(capture: Capture) -> None:
    if isinstance(capture.failure, BrokenPipeError):
        raise capture.failure
    if capture.problem is not None:
        raise capture.problem


def values_problem(capture: Capture) -> str | None:
    full = capture.full_values
    if full is None or full.failure is None:
        return None
    return f"full values could not be written to {full.path.name}: {reason_of(full.failure)}"


# options of the command that `capture` does not take: they print a table, or apply to programs that continue to run
OF_COMMAND = ("audit", "find_longtail", *words_in(OnDemandOptions))
# options about a model that can also be used with a given module; the others only apply while a model is built
OF_MODULES = ("run", "warmup", "steps", "autocast")


def capture(model: str | nn.Module, output: str | Path, inputs: Any = None, **options: Any) -> Trace:
    """Run steps of a model, record them in a trace file, and return the trace.

    model : a module, or a model source as for `opcapture --model`
    inputs : inputs of a module: a tensor, a tuple of positional inputs, or a dictionary; each step gets copies
    options : options of `opcapture --help` by their long names, with `_` in place of `-`; a list for options that take
        several values
    """
    excluded = (*OF_COMMAND, "model", "output")
    with in_words_of_python(), warnings.catch_warnings():
        args = arguments_of(make_parser(), ["--output", str(output)], options, excluded)
        check_capture(args)
        ignore_own_warnings()
        reporter = QuietReporter("opgrip")
        if isinstance(model, nn.Module):
            were_training = [(module, module.training) for module in model.modules()]
            try:
                program = _program(model, inputs, args.run, options)
                done = _capture(under_autocast(program, args.autocast), args, reporter)
            finally:
                for module, was_training in were_training:
                    module.training = was_training
        else:
            args.model = model
            program = build(args, reporter)
            done = _capture(program, args, reporter)
            program.finish()
        check_written(done)
        if problem := values_problem(done):
            raise UserError(problem)
    for note in done.notes():
        warnings.warn(note, stacklevel=2)
    # pandas must not delay the start of a recorded program
    from opgrip.traces.table.trace import load

    return load(done.path, partial=False, unbounded=True)


def _capture(program: ModelProgram, args: argparse.Namespace, reporter: Reporter) -> Capture:
    watched = capture_of(program, args)
    capture_steps(watched, program, args, reporter)
    return watched


def _program(model: nn.Module, inputs: Any, run: str, options: dict[str, Any]) -> ModelProgram:
    strange = sorted({*options} & {*words_in(ModelName, ModelOptions, OperatorOptions, Steps)} - {*OF_MODULES})
    if strange:
        raise UserError(f"{strange[0]}= cannot be used with a module", "configure the module before the call")
    if inputs is None:
        raise UserError("a module needs inputs", "give a tensor, a tuple of positional inputs, or a dictionary")
    return program_of(model, inputs, run, type(model).__name__.lower())
