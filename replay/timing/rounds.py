"""Timed runs of functions until enough times are known: in rounds, as a program mixes its calls, or one by one."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from time import perf_counter_ns, sleep
from typing import Any

import torch

from opgrip.platform.activity_records import recorded_work
from opgrip.platform.contention import let_threads_sleep
from opgrip.platform.sandbox import IDLE
from opgrip.replay.cases.preceding_calls import BEFORE, CallPosition
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import check_use, is_accelerator
from opgrip.replay.operators.memory import is_out_of_memory
from opgrip.replay.timing.caches import Caches, MemoryUse
from opgrip.replay.timing.disturbances import MemoryPace, Watch
from opgrip.replay.timing.ranges import DELAY_KERNEL
from opgrip.replay.timing.samples import FEWEST
from opgrip.replay.timing.stopwatch import Stopwatch
from opgrip.replay.timing.timed_functions import NOWHERE, Run, TimedCase, TimedFunction, timed_cases
from opgrip.replay.timing.timing_options import Effort

# most runs of a function to drop because the processor or the device was slowed down; `--iterations` if that is given.
# One that is always slow is measured anyway, and the rows report it.
MOST_DROPPED = 3 * FEWEST
LONG_NS = 100_000_000  # duration in ns above which runs are not repeated on a slow processor
# time in ns, and number of runs, after which the processor's speed and contention are checked
CHECK_NS, CHECK_RUNS = 2_000_000, 10
# seconds between checks of a contended machine; minimum time in ns for running contended cases again
QUIET_S, RETRY_NS = 0.05, 1_000_000_000
MOST_IN_A_ROW = 5
# number of runs whose kernels are recorded after the timed runs, and time in ns after which only one is run
RECORDED, RECORDED_NS = 5, 200_000_000

NO_ROW = IDLE  # row number for calls that are run without being measured

# function that is called before each run with the case number and the index of its row
Announce = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class FunctionGroup:
    settings: Mapping[str, Any]
    grad: bool
    functions: list[TimedFunction]
    around: Mapping[int, TimedFunction] = field(default_factory=dict)


class Measurer:
    """Times groups of functions.

    caches : caches to bring, before each run, into their state in the program; None to leave them unchanged
    cold : True to empty the caches before each run instead
    announce : called before each run with case number and row index
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        effort: Effort,
        caches: Caches | None,
        announce: Announce,
        seed: int = 0,
        records: bool = False,
        is_throttled: Callable[[], bool] = lambda: False,
        workers: Callable[[], Iterable[int]] | None = None,
        cold: bool = False,
    ) -> None:
        self.effort = effort
        self._stopwatch = stopwatch
        self._caches = caches
        self._cold = cold
        self._just_run: deque[tuple[int, TimedFunction | None]] = deque(maxlen=BEFORE)
        self._announce = announce
        self._memory_pace = MemoryPace() if torch.device(stopwatch.device).type == "cpu" else None
        self._open_watch: Watch | None = None
        self._most_dropped = MOST_DROPPED if effort.iterations is None else effort.iterations
        self._random = random.Random(seed)
        self._pending: list[tuple[TimedFunction, Run, bool]] = []
        self._pending_ns = 0.0
        self._runtime = ""
        self._needs_untimed_runs = is_accelerator(stopwatch.device)
        self._records_work = records
        self._is_throttled = is_throttled
        self._workers = workers

    def one_by_one(self, groups: Sequence[FunctionGroup]) -> Iterator[list[TimedFunction]]:
        """Run the functions of one case in turn until enough times are known, then those of the next case."""
        with self._attentive():
            contended, started_ns = [], perf_counter_ns()
            for group in groups:
                for case in timed_cases(group.functions):
                    self._run_untimed(group, [case])
                    self._run_until_done(group, [case])
                    if case.lacks_quiet_runs(self.effort):
                        contended.append((group, case))
                    else:
                        yield self._settled(group, case)
            yield from self._retry(contended, self._run_until_done, perf_counter_ns() - started_ns)

    def in_rounds(self, groups: Sequence[FunctionGroup]) -> Iterator[list[TimedFunction]]:
        """Run each function once per round, after its preceding calls in the program, until enough times are known."""
        waiting = [(group, timed_cases(group.functions)) for group in groups]
        contended, started_ns = [], perf_counter_ns()
        with self._attentive():
            while any(cases for _, cases in waiting):
                if self._needs_untimed_runs:
                    self._needs_untimed_runs = False
                    for group, cases in waiting:
                        self._run_untimed(group, cases)
                for group, cases in waiting:
                    if cases:
                        self._round(group, cases)
                        done = [case for case in cases if not case.needs_runs(self.effort)]
                        cases[:] = [case for case in cases if case.needs_runs(self.effort)]
                        for case in done:
                            if case.lacks_quiet_runs(self.effort):
                                contended.append((group, case))
                            else:
                                yield self._settled(group, case)
            yield from self._retry(contended, self._round, perf_counter_ns() - started_ns)

    def _retry(
        self,
        contended: Sequence[tuple[FunctionGroup, TimedCase]],
        run: Callable[[FunctionGroup, list[TimedCase]], None],
        spent_ns: int,
    ) -> Iterator[list[TimedFunction]]:
        waiting = list(contended)
        until_ns = perf_counter_ns() + min(len(waiting) * self.effort.budget_s * 1e9, max(spent_ns, RETRY_NS))
        in_a_row = 0
        for _, case in waiting:
            case.try_again()
        while waiting and in_a_row < MOST_IN_A_ROW and perf_counter_ns() < until_ns:
            if not self._watch.has_room:
                # so that a supervisor does not consider this process hanging
                self._announce(waiting[0][1].functions[0].number, NO_ROW)
                sleep(QUIET_S)
                continue
            group, case = waiting.pop(0)
            while case.needs_runs(self.effort) and perf_counter_ns() < until_ns:
                run(group, [case])
            if case.lacks_quiet_runs(self.effort):
                in_a_row += 1
                case.try_again()
                waiting.append((group, case))
            else:
                in_a_row = 0
                yield self._settled(group, case)
        for group, case in waiting:
            yield self._settled(group, case)

    def _run_untimed(self, group: FunctionGroup, cases: Sequence[TimedCase]) -> None:
        if not is_accelerator(self._stopwatch.device):
            return
        with restored(group.settings), torch.set_grad_enabled(group.grad):
            for function in chain.from_iterable(case.active for case in cases):
                self._announce(function.number, function.row)
                try:
                    function.run_untimed(self._stopwatch)
                except Exception as error:
                    self._fail(function, error)

    def _settled(self, group: FunctionGroup, case: TimedCase) -> list[TimedFunction]:
        case.settle(self.effort)
        with restored(group.settings), torch.set_grad_enabled(group.grad):
            for function in (item for item in case.active if item.check_kept is not None):
                self._announce(function.number, function.row)
                try:
                    function.check_results()
                except Exception as error:
                    self._fail(function, error)
        if self._records_work:
            try:
                self._record(group, case)
            except Exception as error:
                # the row has its times, and lacks only the columns of kernels
                check_use(self._stopwatch.device, error)
        return case.functions

    def _record(self, group: FunctionGroup, case: TimedCase) -> None:
        place, spans = case.functions[0].places[0], []
        until_ns = perf_counter_ns() + RECORDED_NS
        with restored(group.settings), torch.set_grad_enabled(group.grad), recorded_work() as work:
            for number in range(1 + RECORDED):
                for function in case.active if number < 2 or perf_counter_ns() < until_ns else ():
                    self._announce(function.number, function.row)
                    span = function.time_apart(self._stopwatch, partial(self._prepare, place, group, function))
                    self._note(function)
                    spans += [(function, *span)] if number else []
        for function, began_ns, ended_ns in spans:
            own = [item for item in work if began_ns <= item.at_ns <= ended_ns and DELAY_KERNEL not in item.name]
            function.recorded.append(own)

    @property
    def _watch(self) -> Watch:
        assert self._open_watch is not None, "it is opened before anything runs"
        return self._open_watch

    @contextmanager
    def _attentive(self) -> Iterator[None]:
        with no_garbage_collection(), closing(Watch(workers=self._workers)) as self._open_watch:
            yield

    def _run_until_done(self, group: FunctionGroup, cases: Sequence[TimedCase]) -> None:
        with restored(group.settings), torch.set_grad_enabled(group.grad):
            for case in cases:
                while case.needs_runs(self.effort):
                    for function in case.next_round(self._random):
                        if self._needs_run(function):
                            self._run(function, group, NOWHERE)
                    self._check(all_of_them=False)
                self._check()

    def _round(self, group: FunctionGroup, cases: Sequence[TimedCase]) -> None:
        places = [self._random.choice(case.functions[0].places) for case in cases]
        turns = [
            (place, function)
            for place, case in zip(places, cases, strict=True)
            for function in case.next_round(self._random)
        ]
        # in the program's order, so that the calls to run before a call have mostly just run
        turns.sort(key=lambda turn: turn[0].position)
        self._just_run.clear()
        with restored(group.settings), torch.set_grad_enabled(group.grad):
            for place, function in turns:
                if self._needs_run(function):
                    self._run(function, group, place)
                    self._check(all_of_them=False)
        self._check()

    def _needs_run(self, function: TimedFunction) -> bool:
        return function.failure is None and len(function.samples) != self.effort.iterations

    def _prepare(self, place: CallPosition, group: FunctionGroup, function: TimedFunction) -> None:
        if self._caches is None:
            return
        if self._cold:
            self._caches.empty()
            return
        functions = [(number, _before(number, group, function)) for number in place.before]
        size = sum(before.used_bytes for _, before in functions if before is not None and before.failure is None)
        run = partial(function.run_apart, partial(self._run_before, functions))
        before = None if _have_just_run(self._just_run, place, function) else MemoryUse(size, run)
        self._caches.restore(function.memory_uses(place, self._caches.used, self._stopwatch.device), before)
        self._announce(function.number, function.row)

    def _run_before(self, functions: Sequence[tuple[int, TimedFunction | None]]) -> None:
        for number, before in functions:
            self._just_run.append((number, before))
            if before is None or before.failure is not None:
                continue
            self._announce(number, NO_ROW)
            self._take_turns(before)
            self._watch.before_run()
            try:
                before.run_before(self._random)
                # an error that the device reports late must not count for the next function
                self._stopwatch.synchronize()
            except Exception as error:
                self._fail(before, error)
            self._note(before)

    def _note(self, function: TimedFunction) -> None:
        if self._caches is not None:
            self._caches.note(function.used_bytes, function.inputs)
            function.used_at = self._caches.used

    def _run(self, function: TimedFunction, group: FunctionGroup, place: CallPosition) -> None:
        self._announce(function.number, function.row)
        began = perf_counter_ns()
        self._take_turns(function)
        function.samples.spent_ns += perf_counter_ns() - began
        is_checked = self._watch.before_run()
        try:
            stratum, time_ns = function.time(self._stopwatch, partial(self._prepare, place, group, function))
        except Exception as error:
            self._fail(function, error)
            return
        finally:
            self._note(function)
            self._just_run.append((function.number, function))
        runs_ns = time_ns * function.block
        is_contended = is_checked and self._watch.is_run_contended(runs_ns)
        run = Run(stratum, time_ns, function.round, function.arrangement)
        self._pending.append((function, run, is_contended))
        self._pending_ns += runs_ns

    def _take_turns(self, function: TimedFunction) -> None:
        runtime = "" if function.in_torch else function.category
        if runtime != self._runtime:
            self._runtime = runtime
            let_threads_sleep()

    def _fail(self, function: TimedFunction, error: Exception) -> None:
        check_use(self._stopwatch.device, error)
        function.fail(error, self._stopwatch.device)
        # a failed call releases all memory that the allocator has kept
        self._needs_untimed_runs = self._needs_untimed_runs or (
            is_out_of_memory(error) and is_accelerator(self._stopwatch.device)
        )

    def _check(self, all_of_them: bool = True) -> None:
        enough = self._pending_ns >= CHECK_NS or len(self._pending) >= CHECK_RUNS
        if not self._pending or not (all_of_them or enough or self.effort.iterations is not None):
            return
        is_slowed, is_contended = self._watch.check(self._pending_ns)
        is_slowed = is_slowed or self._is_throttled()
        memory_rate = None if self._memory_pace is None else self._memory_pace.gb_per_s()
        for function, run, was_contended in self._pending:
            if memory_rate is not None:
                function.samples.add_memory_rate(memory_rate)
            self._keep(function, run, is_contended or was_contended, is_slowed)
        self._pending.clear()
        self._pending_ns = 0.0

    def _keep(self, function: TimedFunction, run: Run, is_contended: bool, is_slowed: bool) -> None:
        is_slowed = is_slowed or is_contended
        # a profiled row needs its runs in the report, contended or not
        if is_contended and not function.profiled:
            function.keep_contended(run)
        elif is_slowed and function.samples.dropped < self._most_dropped and run.time_ns < LONG_NS:
            function.drop()
        else:
            function.keep(run, is_slowed)


def _before(number: int, group: FunctionGroup, function: TimedFunction) -> TimedFunction | None:
    return function if number == function.number else group.around.get(number)


def _have_just_run(
    just_run: Sequence[tuple[int, TimedFunction | None]], place: CallPosition, function: TimedFunction
) -> bool:
    last = list(just_run)[max(len(just_run) - len(place.before), 0) :]
    return [number for number, _ in last] == list(place.before) and all(
        number != function.number or ran is function for number, ran in last
    )


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
