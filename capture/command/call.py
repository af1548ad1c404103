"""Captures a model for a Python program, as `opcapture` does for its user."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from opgrip.capture.command.capture_options import ModelName, Steps, make_parser
from opgrip.capture.command.on_demand_options import OnDemand
from opgrip.capture.command.steps import (
    build,
    capture_of,
    capture_steps,
    check_capture,
    check_written,
    ignore_own_warnings,
    values_problem,
)
from opgrip.capture.models.factory import program_of
from opgrip.capture.models.program import ModelOptions, OperatorOptions, Program, under_autocast
from opgrip.capture.session.capture import Capture
from opgrip.cli.options import arguments_of, words_in
from opgrip.cli.progress import QuietReporter, Reporter
from opgrip.errors import UserError, in_words_of_python
from opgrip.traces.table.trace import Trace, load

OF_COMMAND = ("audit", "find_longtail", *words_in(OnDemand))
"""Options that print a table, or are for programs that go on."""
OF_MODULES = ("run", "warmup", "steps", "autocast")
"""Options of models that a module has which is there already."""


def capture(model: str | nn.Module, output: str | Path, inputs: Any = None, **options: Any) -> Trace:
    """Run a model, and capture its steps.

    ::

        trace = capture(model, "unet.jsonl", torch.rand(8, 3, 64, 64), run="train", steps=3)
        trace = capture("faster-rcnn_r50_fpn_1x_coco.py", "faster_rcnn.jsonl", input_size="320x320")

    Parameters
    ----------
    model : a module, or a source of one as `opcapture --model` takes it
    output : the trace
    inputs : of a module: a tensor, a tuple of positional inputs, or a dictionary of named ones; a step gets copies
    options : those of `opcapture --help` by their long names, with `_` for `-`. Where an option takes several, a list.
        With `run="train"`, a module's parameters are changed as its training steps do, and with `run="predict"` they
        are not; it is in evaluation or training mode as it was when this is done

    Raises
    ------
    TypeError : for an option that there is not
    UserError : for values that an option does not take, a model that cannot be built or fails, and a trace that cannot
        be written
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
    return load(done.path, partial=False, unbounded=True)


def _capture(program: Program, args: argparse.Namespace, reporter: Reporter) -> Capture:
    watched = capture_of(program, args)
    capture_steps(watched, program, args, reporter)
    return watched


def _program(model: nn.Module, inputs: Any, run: str, options: dict[str, Any]) -> Program:
    strange = sorted({*options} & {*words_in(ModelName, ModelOptions, OperatorOptions, Steps)} - {*OF_MODULES})
    if strange:
        raise UserError(f"{strange[0]}= is for models that are built here", "a module is as it is")
    if inputs is None:
        raise UserError("a module needs inputs", "give a tensor, a tuple of positional inputs, or a dictionary")
    return program_of(model, inputs, run, type(model).__name__.lower())
