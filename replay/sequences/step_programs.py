"""Programs that run the calls of a step under a mode, each made and checked on drawn arguments before any call is
timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.flow import FlowingCall
from opgrip.replay.cases.variants import FORWARD, Variant
from opgrip.replay.checks import Reference
from opgrip.replay.checks.verdicts import Tolerance
from opgrip.replay.inputs.input_options import RECORDED
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.modes import Program, Tuning, find_mode, runs_graphs
from opgrip.replay.operators.agreement import bound_indices
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import check_use, synchronizer
from opgrip.replay.operators.lookup import Operator
from opgrip.replay.operators.memory import Arguments, tensors_in
from opgrip.replay.programs import make_program, run_program
from opgrip.replay.results.results import OK, WRONG
from opgrip.replay.run.unmeasured_rows import describe_failure
from opgrip.replay.sequences.call_timers import CallTimer


@dataclass(frozen=True, slots=True)
class CallProgram:
    """Program that runs the calls of a signature under a mode.

    status, reason : status and reason of the result row; if not ok, the calls run in eager so that later calls get
    their
    results
    first_ms : time to make the program and run it once
    """

    program: Program | None
    mutates: bool = False
    status: str = OK
    reason: str = ""
    first_ms: float | None = None
    max_abs: float | None = None
    max_rel: float | None = None

    def run(self, arguments: Arguments, watch: CallTimer) -> Any:
        """Run a call and return its results; only the mode's part is timed."""
        assert self.program is not None, "else it runs in eager"
        args, kwargs = arguments
        entered, named = arguments if self.program.enter is None else self.program.enter(arguments)
        raw_result = watch.run(self.program.function, entered, named)
        if self.program.leave is None:
            return raw_result
        results = self.program.leave(raw_result)
        if self.mutates:
            for tensor, written in zip(tensors_in([args, kwargs]), results.arguments, strict=True):
                tensor.copy_(written)
        return list(results.outputs)


@dataclass(frozen=True, slots=True)
class ModeSettings:
    """Settings for making programs of a step; see `ProgramSettings`."""

    mode: str
    device: str
    by_clock_of_device: bool
    tolerance: Tolerance
    store: str | None = None
    dtype: torch.dtype | None = None

    @property
    def tuning(self) -> Tuning:
        """Default tuning, without a search."""
        return Tuning()

    def wants_grad(self, case: Case) -> bool:
        """Return False: a trace records the calls of a backward pass as separate calls."""
        return False

    def context_of(self, case: Case, way: Variant) -> Mapping[str, Any]:
        return case.context


def check_mode(name: str) -> None:
    """Raise `UserError` if step replay does not support a mode."""
    if runs_graphs(name):
        raise UserError(
            f"{name} replays CUDA graphs, whose results the next run of a call overwrites",
            "leave it out with --sequence, or take compile",
        )
    if not find_mode(name)[0].in_torch:
        raise UserError(
            f"{name} cannot replay a step: it does not write results to the memory that later calls read",
            "leave it out with --sequence",
        )


def make_call_program(call: FlowingCall, operator: Operator, inputs: Inputs, settings: ModeSettings) -> CallProgram:
    """Return the checked program for calls of a signature; raise only if the device is lost."""
    began = perf_counter_ns()
    try:
        if operator.mutates:
            inputs.keep()

        def arguments() -> Arguments:
            if operator.mutates:
                inputs.restore()
            return inputs.make()

        with restored(call.settings), torch.no_grad():
            bound_indices(operator.function, *arguments())
            example = inputs.make()
            way = Variant(0, RECORDED, FORWARD, settings.mode)
            program = make_program(operator, [example], way, settings, None, grad=False)
            _, actual = run_program(program, arguments(), operator.mutates)
            synchronizer(settings.device)()
            first_ms = (perf_counter_ns() - began) / 1e6
            own = inputs.copy() if operator.mutates else inputs
            verdict = Reference(operator.function, own.make, operator.mutates, call.op).check(
                actual, settings.tolerance
            )
    except Exception as error:
        check_use(settings.device, error)
        return CallProgram(None, operator.mutates, *describe_failure(error))
    figures = first_ms, verdict.max_abs, verdict.max_rel
    if not verdict.right:
        return CallProgram(None, operator.mutates, WRONG, verdict.reason or "", *figures)
    return CallProgram(program, operator.mutates, OK, "", *figures)
