"""Judges a variant in a step: errors of calls and modules, and the calls that explain the error of the results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import monotonic

import msgspec
import torch

from opgrip.cli.progress import REDRAW_S, ProgressCallback, ignore_progress
from opgrip.platform.sandbox import Heartbeat, answer
from opgrip.replay.cases.flow import UNWRITTEN, ProgramFlow
from opgrip.replay.inputs.inputs import device_map
from opgrip.replay.modes import EAGER, RunOutputs
from opgrip.replay.operators.devices import is_accelerator
from opgrip.replay.operators.memory import Function
from opgrip.replay.run.workload import Workload, recorded_device
from opgrip.replay.sequences.accuracy.attribution import Attribution, attribute
from opgrip.replay.sequences.accuracy.differences import LARGEST, LocalError, local_error
from opgrip.replay.sequences.accuracy.lock_step import (
    CallRun,
    Follower,
    Observe,
    Overlay,
    detached,
    perturb,
    picked,
    run_together,
)
from opgrip.replay.sequences.accuracy.variant import VariantPrograms
from opgrip.replay.sequences.call_timers import SequenceSettings
from opgrip.replay.sequences.dry_run import NOTHING_EXCLUDED, DryRun, Excluded
from opgrip.replay.sequences.step_replay import beginning, limited_settings, opened_step, run_apart, serve_apart
from opgrip.replay.timing.rounds import Announce
from opgrip.traces import Trace
from opgrip.traces.schema.operator_arguments import written
from opgrip.traces.schema.records import NO_STORAGE

# operators that use the shape of an argument, not its values
SHAPE_ONLY = ("ones_like", "zeros_like", "full_like", "empty_like", "rand_like", "randn_like", "new_")
BEYOND = 16.0  # multiple of the error that rounding causes, above which an accumulated error leaves the noise


@dataclass(frozen=True, slots=True)
class CallError:
    """Errors of one call. Relative errors are root mean squares, relative to that of the reference's results.

    local : relative error on the reference's inputs; `units` is the same in units in the last place, and `excess` as a
        multiple of what rounding explains
    is_local : True if rounding does not explain `local`
    accumulated : relative error on the variant's own inputs
    noise : relative error of a run in which only the last place of each result is changed at random
    magnification : `accumulated` divided by the largest error of its inputs; None if these are exact
    rejoined : why the variant continues with the reference's results; empty if it does not
    """

    index: int
    signature: int
    op: str
    module: str
    phase: str
    local: float = 0.0
    units: float = 0.0
    excess: float = 0.0
    is_local: bool = False
    accumulated: float = 0.0
    noise: float = 0.0
    magnification: float | None = None
    is_lost: bool = False
    rejoined: str = ""

    @property
    def is_beyond(self) -> bool:
        return self.is_lost or self.accumulated > BEYOND * max(self.noise, torch.finfo(torch.float32).eps)


@dataclass(frozen=True, slots=True)
class ModuleError:
    """Errors of the calls of a module in one phase.

    entered, left : largest relative error of the results of other modules that it takes, and of its last call's results
    """

    module: str
    phase: str
    calls: int
    units: float
    entered: float
    left: float

    @property
    def magnification(self) -> float | None:
        return self.left / self.entered if self.entered else None


@dataclass(frozen=True, slots=True)
class StepResultError:
    """Error of a result of the step: memory that no later call uses."""

    index: int
    op: str
    module: str
    relative: float


@dataclass(frozen=True, slots=True)
class AccuracyResult:
    """Errors of a variant in a step.

    variant : how the variant differs, such as `compile`; empty if only its inputs are perturbed
    in_program : number of calls that run the variant's program
    reasons : why calls run as in the reference, by signature number
    passes : number of runs of the step
    """

    variant: str
    calls: tuple[CallError, ...]
    modules: tuple[ModuleError, ...]
    results: tuple[StepResultError, ...]
    in_program: int
    not_run: int
    reasons: dict[int, str]
    passes: int
    attribution: Attribution | None = None

    @property
    def first_beyond(self) -> CallError | None:
        return next((call for call in self.calls if call.is_beyond), None)

    @property
    def first_lost(self) -> CallError | None:
        return next((call for call in self.calls if call.is_lost), None)


def judge_step(
    trace: Trace,
    settings: SequenceSettings,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    on_progress: ProgressCallback = ignore_progress,
    excluded: Excluded = NOTHING_EXCLUDED,
    announce: Announce = lambda number, row: None,
) -> AccuracyResult:
    """Replay a step and a variant of it call by call, and return the variant's errors.

    dtype, device : what the variant computes with; None for the same as the reference
    excluded : row status and reason of calls that must not run, by signature number
    """
    with opened_step(trace, settings, excluded, announce) as (trace, dry_run):
        begin = beginning(dry_run, settings)
        dry_run.settle(begin, on_progress)
        return _Judge(trace, dry_run, settings, VariantPrograms(settings, dtype, device), begin, on_progress).judge()


@dataclass(slots=True)
class _Judge:
    trace: Trace
    dry_run: DryRun
    settings: SequenceSettings
    programs: VariantPrograms
    begin: Callable[[], None]
    on_progress: ProgressCallback
    passes: int = 0
    calls: list[CallError] = field(default_factory=list)
    in_program: int = 0
    _reported: float = 0.0
    # of the storages in use: the module that wrote them last
    _writers: dict[int, str] = field(default_factory=dict)
    _modules: dict[tuple[str, str], ModuleError] = field(default_factory=dict)

    def judge(self) -> AccuracyResult:
        own = self.trace.own_calls
        places = list(zip(own["module"].astype(str).tolist(), own["phase"].astype(str).tolist(), strict=True))
        flow, is_eager = self.dry_run.flow, self.programs.is_eager
        results, maker = results_of(flow, [phase for _, phase in places])
        unit = 0.0 if self.programs.dtype is None else torch.finfo(self.programs.dtype).eps
        self.begin()
        variant, noise = self._follower(lambda index: True), self._follower(lambda index: False, unit)
        noise.programs = None
        if is_eager:
            self._perturb_outside(variant.overlay)
        followers = [variant] if is_eager else [variant, noise]

        def observe(run: CallRun, program: Function | None) -> None:
            error = self._local(run, program) if program is not None else LocalError()
            self.in_program += program is not None
            module, phase = places[run.index]
            self._add(run, module, phase, error, variant, noise)

        self._run(followers, results, observe)
        calls = [replace(call, rejoined=variant.rejoined.get(call.index, "")) for call in self.calls]
        errors = variant.results
        attribution = None if is_eager else attribute(calls, errors, lambda on: self._errors_of(on, results))
        return AccuracyResult(
            variant=self._name(),
            calls=tuple(calls),
            modules=tuple(self._modules.values()),
            results=tuple(
                StepResultError(maker[number], flow.calls[maker[number]].op, places[maker[number]][0], error)
                for number, error in errors.items()
            ),
            in_program=self.in_program,
            not_run=len(flow.calls) - len(self.calls),
            reasons=dict(self.programs.reasons),
            passes=self.passes,
            attribution=attribution,
        )

    def _name(self) -> str:
        mode = "" if self.settings.mode == EAGER else self.settings.mode
        dtype = "" if self.programs.dtype is None else str(self.programs.dtype).removeprefix("torch.")
        return ", ".join(filter(None, (mode, dtype, self.programs.device or "")))

    def _follower(self, switched: Callable[[int], bool], perturbation: float | None = None) -> Follower:
        return Follower(Overlay(self.dry_run.memory), self.programs, switched, perturbation)

    def _perturb_outside(self, overlay: Overlay) -> None:
        generator = torch.Generator().manual_seed(self.settings.seed)
        for number in self.dry_run.flow.outside:
            views = self.dry_run.flow.needs[number].views
            if not views or not views[-1].dtype.is_floating_point or number not in self.dry_run.memory.live:
                continue
            overlay.separate(number)
            tensor = overlay.view(number, views[-1])
            perturb(tensor, 0.0, generator)
            overlay.errors[number] = torch.finfo(tensor.dtype).eps

    def _errors_of(self, switched: Callable[[int], bool], results: Mapping[int, Sequence[int]]) -> Mapping[int, float]:
        self.begin()
        follower = self._follower(switched)
        self._run([follower], results)
        return follower.results

    def _run(
        self,
        followers: Sequence[Follower],
        results: Mapping[int, Sequence[int]],
        observe: Observe | None = None,
    ) -> None:
        self.passes += 1
        count = len(self.dry_run.flow.calls)

        def on_call(index: int) -> None:
            if monotonic() - self._reported > REDRAW_S:
                self._reported = monotonic()
                self.on_progress(f"comparing, replay {self.passes}", index, count)

        run_together(self.dry_run, self.programs, followers, self.settings.device, results, observe, on_call)

    def _local(self, run: CallRun, program: Function) -> LocalError:
        kind = run.kind
        mutates, is_written = kind.operator.mutates, kind.written

        def make_arguments() -> tuple[tuple[object, ...], dict[str, object]]:
            return detached(run.arguments) if mutates else run.arguments

        if kind.is_random:
            return LocalError()
        arguments = make_arguments()
        try:
            ours = picked(RunOutputs.of(program(*arguments[0], **arguments[1]), arguments, mutates), is_written)
            reference = picked(RunOutputs.of(run.result, run.used, mutates), is_written)
            if [tensor.shape for tensor in ours] != [tensor.shape for tensor in reference]:
                return LocalError(LARGEST, LARGEST, LARGEST, exceeds_noise=True)
            return local_error(
                kind.operator.function,
                make_arguments,
                mutates,
                ours,
                reference,
                lambda own: picked(own, is_written),
                self.programs.dtype,
                self.programs.cast,
            )
        except Exception as error:
            self.programs.remove(run.call, error)
            return LocalError()

    def _add(
        self, run: CallRun, module: str, phase: str, error: LocalError, variant: Follower, noise: Follower
    ) -> None:
        call = run.call
        before = variant.error_before
        self.calls.append(
            CallError(
                *(run.index, call.signature, call.op, module, phase),
                local=error.relative,
                units=min(error.units, LARGEST),
                excess=error.excess,
                is_local=error.exceeds_noise,
                accumulated=variant.error,
                noise=noise.error,
                magnification=variant.error / before if before and run.targets else None,
                is_lost=variant.lost[-1:] == [run.index],
            )
        )
        outer = [number for number in call.inputs if self._writers.get(number) != module]
        entered = max((variant.overlay.errors.get(number, 0.0) for number in outer), default=0.0)
        whole = self._modules.get((module, phase)) or ModuleError(module, phase, 0, 0.0, 0.0, 0.0)
        self._modules[module, phase] = replace(
            whole,
            calls=whole.calls + 1,
            units=max(whole.units, error.units),
            entered=max(whole.entered, entered),
            left=variant.error if run.targets else whole.left,
        )
        self._writers.update((target.number, module) for target in run.targets)


@dataclass(slots=True)
class _Life:
    maker: int
    is_used: bool = False


def results_of(flow: ProgramFlow, phases: Sequence[str]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return the numbers of the storages that hold results of the step, by index of the last call that uses them, and
    the index of the call that wrote each result.

    A result is memory whose values no later call uses.

    phases : phase of each call
    """
    lives: dict[int, _Life] = {}
    ends: dict[int, list[int]] = {}
    made: dict[int, list[int]] = {}
    outside = set(flow.outside)
    for index, call in enumerate(flow.calls):
        signature = flow.signatures.get(call.signature)
        flags = written(signature) if signature is not None else []
        into = {number for number, is_written in zip(call.inputs, flags, strict=False) if is_written}
        new = {number for number in call.outputs if number not in lives and number not in outside}
        # views, reads by the host, and operators that take only a shape do not use values
        reads = bool(call.outputs) and not call.op.partition(".")[2].startswith(SHAPE_ONLY)
        for number in {*call.inputs} - into - {*call.outputs} if reads else ():
            if number in lives:
                lives[number].is_used = True
        if not call.op.startswith(UNWRITTEN):
            made[index] = [*new]
            lives.update((number, _Life(index)) for number in {*new, *into} - {NO_STORAGE})
        for number in call.over:
            if number in lives and not lives[number].is_used:
                ends.setdefault(index, []).append(number)
    results: dict[int, list[int]] = {}
    for index, numbers in ends.items():
        kept = [number for number in numbers if not _is_byproduct(lives[number], phases, made, lives)]
        if kept:
            results[index] = kept
    return results, {number: lives[number].maker for numbers in results.values() for number in numbers}


def _is_byproduct(
    life: _Life, phases: Sequence[str], made: Mapping[int, Sequence[int]], lives: Mapping[int, _Life]
) -> bool:
    # a forward pass makes such results for a backward pass
    others = made.get(life.maker, ())
    return phases[life.maker] == "forward" and any(lives[number].is_used for number in others if number in lives)


MODULE = "opgrip.replay.sequences.accuracy.judge"


def judge_apart(workload: Workload, on_progress: ProgressCallback, may_fork: bool) -> AccuracyResult:
    """Judge a variant of a step in a child process, which a call may end."""
    return msgspec.convert(run_apart(workload, _answer, MODULE, on_progress, may_fork), AccuracyResult)


def _answer(workload: Workload, excluded: Excluded, heartbeat: Heartbeat, output: int) -> None:
    settings, dtype = limited_settings(workload), workload.dtype
    requested = workload.request.inputs.device
    device = None
    if requested is not None and is_accelerator(requested) and settings.mode == EAGER and dtype is None:
        # the device is the variant
        device, settings = settings.device, replace(settings, device="cpu")
        settings = replace(settings, place=device_map(recorded_device(workload.trace), "cpu"))

    def judge(on_progress: ProgressCallback) -> dict[str, object]:
        trace = workload.trace
        return asdict(judge_step(trace, settings, dtype, device, on_progress, excluded, heartbeat.enter))

    answer(judge, output)


if __name__ == "__main__":
    sys.exit(serve_apart(_answer))
