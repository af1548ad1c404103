"""Timers for the calls of a step, and programs for these calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import torch

from opgrip.errors import UserError
from opgrip.replay.cases.flow import FlowingCall, NewMemory
from opgrip.replay.cases.selection import FORWARD, Variant
from opgrip.replay.inputs.input_options import RECORDED
from opgrip.replay.inputs.inputs import DeviceMap, Inputs
from opgrip.replay.modes import EAGER, Program, Tuning, find_mode, runs_graphs
from opgrip.replay.modes.candidate import CandidateOptions
from opgrip.replay.operators.agreement.indices import bound_indices
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import check_use, current_stream, is_accelerator, make_event, synchronizer
from opgrip.replay.operators.lookup import TRUSTED_EXTENSIONS, Operator
from opgrip.replay.operators.memory import Arguments, Function, tensors_in
from opgrip.replay.results.results import OK, WRONG
from opgrip.replay.run.checks.reference import Reference
from opgrip.replay.run.checks.verdicts import Tolerance
from opgrip.replay.run.programs import make_program, run_program
from opgrip.replay.run.workload import Workload, describe_failure
from opgrip.replay.timing import pages
from opgrip.replay.timing.stopwatch import keep_busy
from opgrip.replay.timing.timing_options import GRAPH

# time for passes timed by the host; an accelerator's times are from passes that its own clock times
BUDGET_S, BUDGET_ON_ACCELERATOR_S = 10.0, 3.0


class CallTimer(Protocol):
    """Runs and times the calls of a step once, in order.

    on_device : indices of the calls that were timed with the device's clock
    """

    on_device: list[int]

    def run(self, function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...

    def skip(self) -> None: ...

    def times_ns(self) -> list[int]: ...

    def renewed(self) -> CallTimer: ...


class HostTimer:
    """Times calls with the host's clock; on an accelerator, this measures their launches.

    new_memory : newly mapped memory that results of calls should get, by index of the call
    """

    def __init__(self, new_memory: Mapping[int, NewMemory], wait: Callable[[], None] | None = None) -> None:
        self.on_device: list[int] = []
        self._times: list[int] = []
        self._new_memory = new_memory
        self._wait = wait

    def run(self, function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        memory = self._new_memory.get(len(self._times))
        if memory is not None:
            pages.arrange(memory.sizes, memory.fresh_bytes)
        if isinstance(function, torch._ops.OpOverload):
            # a capture times the operator without its Python layer
            function = function._op
        if self._wait is not None:
            self._wait()
        start = perf_counter_ns()
        result = function(*args, **kwargs)
        self._times.append(perf_counter_ns() - start)
        return result

    def skip(self) -> None:
        self._times.append(0)

    def times_ns(self) -> list[int]:
        return self._times

    def renewed(self) -> HostTimer:
        return HostTimer(self._new_memory, self._wait)


class DeviceClockTimer:
    """Times calls that run on an accelerator with its clock, and all other calls with the host's clock.

    launch_ns : expected time of each call's launch
    """

    def __init__(self, device: str, launch_ns: Sequence[float]) -> None:
        self._device = device
        self._launch_ns = launch_ns
        self._times: list[int] = []
        self._events: list[tuple[Any, Any]] = []
        self.on_device: list[int] = []

    def run(self, function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        before, after = make_event(self._device), make_event(self._device)
        keep_busy(self._device, self._launch_ns[len(self._times)])
        stream = current_stream(self._device)
        before.record(stream)
        start = perf_counter_ns()
        result = function(*args, **kwargs)
        spent = perf_counter_ns() - start
        after.record(stream)
        kind = torch.device(self._device).type
        if any(tensor.device.type == kind for tensor in tensors_in([list(args), kwargs, result])):
            self.on_device.append(len(self._times))
            self._events.append((before, after))
        self._times.append(spent)
        return result

    def skip(self) -> None:
        self._times.append(0)

    def times_ns(self) -> list[int]:
        synchronizer(self._device)()
        for index, (before, after) in zip(self.on_device, self._events, strict=False):
            self._times[index] = round(before.elapsed_time(after) * 1e6)
        self._events.clear()
        return self._times

    def renewed(self) -> DeviceClockTimer:
        return DeviceClockTimer(self._device, self._launch_ns)


def typical_ns(passes: Sequence[Sequence[int]]) -> list[float]:
    medians: list[float] = np.median(np.array(passes, dtype=np.float64), axis=0).tolist()
    return medians


@dataclass(frozen=True, slots=True)
class CallProgram:
    """The program that runs the calls of a signature in a mode.

    program : None if the mode cannot run the calls, which then run in eager so that later calls get their results
    max_abs, max_rel : largest absolute and relative difference from the results of eager
    """

    program: Program | None
    mutates: bool = False
    status: str = OK
    reason: str = ""
    first_ms: float | None = None
    max_abs: float | None = None
    max_rel: float | None = None

    def run(self, arguments: Arguments, timer: CallTimer) -> Any:
        """Run a call and return its results; `timer` does not time the conversion of arguments and results."""
        assert self.program is not None, "without a program, calls run in eager"
        args, kwargs = arguments
        entered, named = arguments if self.program.enter is None else self.program.enter(arguments)
        raw_result = timer.run(self.program.function, entered, named)
        if self.program.leave is None:
            return raw_result
        results = self.program.leave(raw_result)
        if self.mutates:
            for tensor, written in zip(tensors_in([args, kwargs]), results.arguments, strict=True):
                tensor.copy_(written)
        return list(results.outputs)


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Settings of a step replay.

    repeats : number of timed runs of the step; None for as many as `precision` needs within `budget_s` seconds, at
        least 3
    warmup : number of untimed runs before them, of which the dry run has made at least 2
    precision : target for the interquartile range of the times of these runs, relative to their median
    in_pairs : True to time each run also in eager, so that the mode can be compared with eager
    """

    place: DeviceMap
    device: str
    seed: int = 0
    extensions: Collection[str] = TRUSTED_EXTENSIONS
    repeats: int | None = None
    warmup: int = 2
    precision: float = 0.05
    budget_s: float = BUDGET_S
    room_bytes: int | None = None
    mode: str = EAGER
    tolerance: Tolerance = field(default_factory=Tolerance)
    store: str | None = None
    tuning: Tuning = field(default_factory=Tuning)
    candidates: CandidateOptions = field(default_factory=CandidateOptions)
    in_graphs: bool = False
    in_pairs: bool = False


def sequence_settings(workload: Workload) -> SequenceSettings:
    request = workload.request
    in_pairs = request.candidates.confirm
    # a pair is two passes, and differences need more of them than times
    budget_s = (BUDGET_ON_ACCELERATOR_S if is_accelerator(workload.device) else BUDGET_S) * (6 if in_pairs else 1)
    return SequenceSettings(
        place=workload.place,
        device=workload.device,
        seed=request.inputs.seed,
        extensions=request.inputs.extensions,
        repeats=request.effort.iterations,
        warmup=request.effort.warmup,
        precision=request.effort.precision,
        budget_s=budget_s,
        room_bytes=request.limits.memory_limit,
        mode=request.modes.mode[-1],
        tolerance=request.tolerance,
        candidates=request.candidates,
        in_graphs=request.timing.exec_mode == GRAPH and not in_pairs,
        in_pairs=in_pairs,
    )


def check_mode(name: str, copies_results: bool = False) -> None:
    if runs_graphs(name):
        raise UserError(
            f"{name} replays CUDA graphs, whose results the next run of a call overwrites",
            "remove it from --mode for --sequence, or use compile",
        )
    if not find_mode(name)[0].in_torch and not copies_results:
        raise UserError(
            f"{name} cannot replay a step: it does not write results to the memory that later calls read",
            "remove it from --mode for --sequence",
        )


def make_call_program(call: FlowingCall, operator: Operator, inputs: Inputs, settings: SequenceSettings) -> CallProgram:
    """Return the program for the calls of a signature, after a comparison of its results with eager."""
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
            program = make_program(
                operator,
                [example],
                way,
                None,
                False,
                call.op,
                device=settings.device,
                store=settings.store,
                tuning=settings.tuning,
                candidates=settings.candidates,
                # programs must run on torch's streams, whose events time their calls
                by_device=is_accelerator(settings.device),
            )
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
