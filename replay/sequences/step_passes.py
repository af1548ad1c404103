"""Timed runs of all calls of a step (passes), in pairs if a mode is compared with eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np

from opgrip.replay.cases.flow import FlowingCall
from opgrip.replay.operators.devices import check_use, is_accelerator, module_of, synchronizer
from opgrip.replay.results.paired_ratio import WITHIN_95
from opgrip.replay.sequences.call_timers import CallTimer
from opgrip.replay.sequences.dry_run import CallPlan, DryRun, switching
from opgrip.replay.sequences.step_memory import Lanes, reason_of
from opgrip.replay.timing.disturbances import PassWatch
from opgrip.replay.timing.rounds import NO_ROW

RESAMPLES = 100  # number of bootstrap samples


@dataclass(frozen=True, slots=True)
class Pass:
    """Times and memory of one run of all calls of a step.

    peak_bytes : largest size of the memory that calls allocated
    is_contended : True if other processes used the cores for a relevant share of the run
    eager : run in eager that was timed just before or after this one, if the mode is compared with eager
    """

    times_ns: list[int]
    wall_ns: int
    peak_bytes: int
    on_device: frozenset[int] = frozenset()
    slowed: bool = False
    is_contended: bool = False
    contended_calls: frozenset[int] = frozenset()
    eager: Pass | None = None
    stamps: Any = None

    @property
    def launch_ns(self) -> list[int]:
        return self.times_ns if self.eager is None else list(map(max, self.times_ns, self.eager.times_ns))


@dataclass(slots=True)
class Passes:
    """The timed runs of a step.

    contended : runs in which other processes used the cores; only their undisturbed calls can count
    is_contended : True if `kept` contains contended runs because there are no others
    """

    kept: list[Pass] = field(default_factory=list)
    contended: list[Pass] = field(default_factory=list)
    is_contended: bool = False
    waited_ns: int = 0
    dropped: int = 0
    failures: int = 0
    failure: str = ""

    def add(self, one: Pass, may_drop: bool) -> None:
        if one.is_contended:
            self.contended.append(one)
        elif one.slowed and may_drop:
            self.dropped += 1
        else:
            self.kept.append(one)

    def settle(self) -> None:
        """Use the times of contended runs if there are no other runs."""
        if self.contended and not self.kept:
            self.kept, self.contended, self.is_contended = self.contended, [], True

    def fail(self, reason: str) -> None:
        self.failures, self.failure = self.failures + 1, reason

    @property
    def slowed(self) -> int:
        return sum(one.slowed for one in self.kept)


@dataclass(frozen=True, slots=True)
class PairedSaving:
    """The share of a step's time that a mode saves, measured in pairs of runs in the mode and in eager.

    saving, error : saved share of the step's time, negative if the mode is slower; half of its 95 % interval
    own_saving, own_error : part of `saving` in the calls that run in the mode, and half of its 95 % interval
    shares : (signature number, share of the step's time in eager) of the calls that run in the mode
    """

    saving: float
    error: float
    own_saving: float
    own_error: float
    shares: tuple[tuple[int, float], ...]


def paired_saving(passes: Sequence[Pass], own: Mapping[int, int]) -> PairedSaving:
    """Return the share of the step's time that a mode saves.

    own : signature numbers of the calls that run in the mode, by index of the call
    """
    pairs = [(one.times_ns, one.eager.times_ns) for one in passes if one.eager]
    times_ns = np.array(pairs, dtype=np.float64).transpose(1, 0, 2)
    random = np.random.default_rng(0)
    count, indices = times_ns.shape[1], list(own)
    # one at a time: together they would take a hundred times the memory
    resampled = (times_ns[:, random.integers(0, count, count)] for _ in range(RESAMPLES))
    saving, own_saving = map(float, _savings(times_ns, indices))
    error, own_error = map(float, WITHIN_95 * np.std([_savings(sample, indices) for sample in resampled], axis=0))
    eager = np.median(times_ns[1], axis=0)
    shares: dict[int, float] = {}
    for index, signature in own.items():
        shares[signature] = shares.get(signature, 0.0) + float(eager[index] / eager.sum())
    return PairedSaving(saving, error, own_saving, own_error, tuple(shares.items()))


def _savings(times_ns: np.ndarray[Any, np.dtype[np.float64]], indices: Sequence[int]) -> tuple[Any, Any]:
    ours, eager = np.median(times_ns, axis=1)
    saved = eager - ours
    return saved.sum() / eager.sum(), saved[indices].sum() / eager.sum()


# function that runs and times one pass, such as `run_timed`
RunPass: TypeAlias = Callable[[Any, str, Any, PassWatch], tuple[Pass, str]]


def run_timed(dry_run: DryRun, device: str, timer: CallTimer, watch: PassWatch) -> tuple[Pass, str]:
    """Run the calls of the step once; return the times, and the reason why a call failed (empty if none failed)."""
    synchronize, failure = synchronizer(device), ""
    allocator = module_of(device) if is_accelerator(device) else None
    at_start = 0
    if allocator is not None:
        allocator.reset_peak_memory_stats(device)
        at_start = allocator.memory_allocated(device)
    lanes = None if dry_run.streams is None else Lanes(dry_run.streams, device)
    with switching() as use, ExitStack() as at_end:
        if lanes is not None:
            at_end.callback(lanes.end)
        synchronize()
        watch.begin()
        start = perf_counter_ns()
        for index, (call, plan) in enumerate(zip(dry_run.flow.calls, dry_run.plans, strict=True)):
            use(call.settings)
            if lanes is not None:
                lanes.before(index)
            if dry_run.meets_others(call, plan):
                timer.skip()
            else:
                try:
                    run_call(dry_run, call, plan, timer)
                except Exception as error:
                    check_use(device, error)
                    failure = f"{call.op}: {reason_of(error)}"
                    dry_run.mark_not_replayed(call, plan, reason_of(error))
                    if not dry_run.has_others:
                        break
                    # the other ranks wait for this rank's collectives
                    dry_run.pass_on_results(call, plan, None)
            if lanes is not None:
                lanes.drop(call.over, dry_run.memory)
            dry_run.memory.drop(call.over)
            watch.after_call()
        dry_run.finish()
        synchronize()
        wall = perf_counter_ns() - start
        watch.end()
    peak = dry_run.memory.peak_bytes
    if allocator is not None:
        peak = allocator.max_memory_allocated(device) - at_start
    return Pass(
        times_ns=timer.times_ns(),
        wall_ns=wall,
        peak_bytes=peak,
        on_device=frozenset(timer.on_device),
        slowed=watch.is_slowed,
        is_contended=watch.is_contended,
        contended_calls=watch.contended_calls,
    ), failure


def run_call(dry_run: DryRun, call: FlowingCall, plan: CallPlan, timer: CallTimer) -> None:
    """Run a call as planned and store its results for later calls; `timer` times it, or skips it if it cannot run."""
    if plan.prepared is None:
        dry_run.pass_on_results(call, plan, None)
        timer.skip()
        return
    if plan.refilled:
        dry_run.refill(call, plan)
    own = dry_run.programs.get(call.signature)
    args, kwargs = plan.prepared.arguments(dry_run.memory, call.inputs)
    dry_run.announce(call.signature, NO_ROW)
    if own is None or own.program is None:
        result = timer.run(plan.prepared.function, args, kwargs)
    else:
        result = own.run((args, kwargs), timer)
    dry_run.pass_on_results(call, plan, result)


def in_pairs(begin: Callable[[], None]) -> RunPass:
    """Return a function that times two runs of the step, one with the programs of the mode and one in eager."""
    is_eager_first = False

    def run(dry_run: DryRun, device: str, timer: CallTimer, watch: PassWatch) -> tuple[Pass, str]:
        nonlocal is_eager_first
        is_eager_first = not is_eager_first
        programs = dry_run.programs
        passes: dict[bool, Pass] = {}
        try:
            for is_eager in (is_eager_first, not is_eager_first):
                if passes:
                    begin()
                dry_run.programs = {} if is_eager else programs
                passes[is_eager], failure = run_timed(dry_run, device, timer.renewed(), watch)
                if failure:
                    return passes[is_eager], failure
        finally:
            dry_run.programs = programs
        # a disturbance affects both passes of a pair alike, and the median of a call over all pairs little
        return replace(passes[False], slowed=False, is_contended=False, eager=passes[True]), ""

    return run
