"""Functions to time, with their input sets and the times of their runs."""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from time import perf_counter_ns, time_ns
from typing import Any, NamedTuple

import torch

from opgrip.platform.activity_records import LaunchedWork
from opgrip.replay.cases.preceding_calls import CallPosition
from opgrip.replay.inputs.inputs import Inputs
from opgrip.replay.modes import RunOutputs
from opgrip.replay.operators.memory import LARGE, Arguments, Function, is_out_of_memory, mostly_fresh, release_memory
from opgrip.replay.timing import pages
from opgrip.replay.timing.caches import MemoryUse
from opgrip.replay.timing.ranges import BEFORE, DROPPED, READY, Range
from opgrip.replay.timing.samples import FEWEST, Samples
from opgrip.replay.timing.stopwatch import LaunchTime, Stopwatch, block_size, on_deeper_stack
from opgrip.replay.timing.timing_options import CONTINUOUS, GRAPH, Effort

# maximum number of copies of arguments for a block of runs, and maximum number of bytes in all copies
COPIES, COPIED_BYTES = 64, 256 << 20

MOST_KEPT = 2  # number of timed runs of a candidate, chosen at random, whose results are checked
MOST_SLOW = 3  # number of consecutive runs with slow page faults after which the last one counts
NOWHERE = CallPosition(0, ())

Stratum = tuple[int, bool]  # the input set of a run, and True if its results were in new pages


class Run(NamedTuple):
    """A timed run.

    round : number of the round; in each round, every function of the case runs once
    """

    stratum: Stratum
    time_ns: float
    round: int
    arrangement: int


@dataclass(slots=True)
class InputSet:
    """Copies of the same inputs, and the arguments made from them if runs do not write into the inputs."""

    sets: list[Inputs]
    ready: list[Arguments] = field(default_factory=list)

    def rotate(self, timed: Inputs | None = None) -> Inputs:
        """Choose the inputs of the next run: the copy that was used longest ago, if possible not `timed`."""
        self.sets.append(self.sets.pop(0))
        if self.ready:
            self.ready.append(self.ready.pop(0))
        return self.rotate() if self.sets[0] is timed else self.sets[0]


@dataclass(slots=True)
class TimedFunction:
    """A function to time (a case in one mode), its input sets, and the times of its runs.

    mutates : True if runs change the arguments, which are then restored before each run
    fresh : share of the program's calls whose results are in newly mapped pages; None if irrelevant or unknown
    shares : share of the program's calls that each input set represents; empty if all are equal
    exchanges : functions of a case with the same key exchange their arguments between rounds; None for no exchange
    frames : number of frames to add to the C stack before the next timed run
    used_bytes : number of bytes that a run uses
    inputs : inputs of the latest run
    recorded : for each recorded run after the timed ones, the work that it launched on the device
    check_kept : raises an error if results of timed runs, each with the number of its input set, are wrong
    """

    number: int
    label: str
    category: str
    function: Function
    input_sets: Sequence[InputSet]
    mutates: bool
    fresh: float | None
    result_bytes: int
    used_bytes: int = 0
    inputs: Inputs | None = None
    used_at: int = 0
    enter: Callable[[Arguments], Arguments] | None = None
    enters_each_run: bool = False
    row: int = 0
    shares: Sequence[float] = ()
    places: Sequence[CallPosition] = (NOWHERE,)
    profiled: str = ""
    in_torch: bool = True
    exchanges: Hashable = None
    fewest: int = FEWEST
    partners: Sequence[TimedFunction] = ()
    round: int = 0
    arrangement: int = 0
    frames: int = 0
    wanted: Hashable = None
    samples: Samples = field(init=False)
    runs: list[Run] = field(default_factory=list)
    failure: Exception | None = None
    recorded: list[list[LaunchedWork]] = field(default_factory=list)
    check_kept: Callable[[Sequence[tuple[int, RunOutputs]]], None] | None = None
    _kept: list[tuple[int, RunOutputs]] = field(default_factory=list)
    _finished: int = 0
    _range: Range = field(init=False)
    _ready: Range = field(init=False)
    _before: Range = field(init=False)
    _dropped: Range = field(init=False)
    _size: int = 1
    _launch: LaunchTime = field(default_factory=LaunchTime)
    _launch_apart: LaunchTime = field(default_factory=LaunchTime)
    _graphs: dict[tuple[int, int], Any] = field(default_factory=dict)
    _timed: Inputs | None = None
    _latest: Arguments = ((), {})
    _input_set: InputSet = field(default_factory=lambda: InputSet([]))
    _faulted: bool = False
    _began_ns: int = 0

    def __post_init__(self) -> None:
        self.samples = Samples(self._shares(), bool(self.profiled), self.fewest)
        self._range = Range(self.label, self.category, self.number, self.profiled)
        self._ready = Range(READY, self.category, self.number)
        self._before = Range(BEFORE, self.category, self.number)
        self._dropped = Range(DROPPED, self.category, self.number)
        if not self.mutates:
            for input_set in self.input_sets:
                input_set.ready = [self._entered(inputs) for inputs in input_set.sets]

    def copy_inputs(self, count: int) -> None:
        """Let runs use `count` copies of the inputs in turn, because the program's calls use different memory."""
        for input_set in self.input_sets:
            while len(input_set.sets) < count:
                input_set.sets.append(input_set.sets[0].copy(keep=self.mutates))
                if not self.mutates:
                    input_set.ready.append(self._entered(input_set.sets[-1]))

    def _entered(self, inputs: Inputs) -> Arguments:
        ready = inputs.make()
        return ready if self.enter is None or self.enters_each_run else self.enter(ready)

    def fail(self, error: Exception, device: str) -> None:
        """Record an error and release the memory of the arguments and graphs; the function does not run again."""
        self.failure = self.failure or error
        self.input_sets = ()
        self._kept.clear()
        self._graphs.clear()
        # frames of the failed run still reference its tensors
        traceback.clear_frames(error.__traceback__)
        if is_out_of_memory(error):
            release_memory(device)

    def run(self) -> None:
        args, kwargs = self._arguments(self.input_sets[0], 1)[0]
        self.function(*args, **kwargs)

    def run_before(self, generator: Random) -> None:
        self._before.begin()
        try:
            able = [partner for partner in self.partners if partner.failure is None]
            self._run_other(generator.choice(able or [self]).input_sets[0])
        finally:
            self._before.end()

    def run_untimed(self, stopwatch: Stopwatch) -> None:
        graph = self._graph_of(0, stopwatch) if stopwatch.method == GRAPH else None
        for _ in range(2):
            self._launch = LaunchTime()
            stopwatch.time(self.function, self.ready(self._size), self._before, self._launch, graph)
            stopwatch.result = None

    @property
    def is_launch_bound(self) -> bool:
        return self._launch.is_waited_for

    def ready(self, count: int) -> list[Arguments]:
        return self._arguments(self.input_sets[0], count)

    def time(self, stopwatch: Stopwatch, prepare: Callable[[], None]) -> tuple[Stratum, float]:
        """Time one run, or several together; return input set, whether results were in new pages, and ns of one run.

        prepare : called before the run, to set the state of the caches
        """
        began = perf_counter_ns()
        for attempt in range(1, MOST_SLOW + 1):
            self._ready.begin()
            has_wanted = self.wanted is not None and self.samples.shares.get(self.wanted)
            next_stratum: Any = self.wanted if has_wanted else self.samples.next_stratum
            index, fresh = next_stratum
            self._input_set = self.input_sets[index]
            self.inputs = self._timed = inputs = self._input_set.rotate()
            graph = self._graph_of(index, stopwatch) if stopwatch.method == GRAPH else None
            runs = self._arguments(self.input_sets[index], self._size)
            self._latest = runs[0]
            prepare()
            self.inputs, self._timed = inputs, None
            if self.fresh is not None and pages.CONTROLLED:
                if fresh:
                    pages.give_back()
                elif self._faulted:
                    pages.touch(self.result_bytes)
            self._ready.end()
            count = None if self.fresh is None else pages.FaultCount()
            self._began_ns = time_ns()
            run_ns = on_deeper_stack(self.frames, stopwatch.time, self.function, runs, self._range, self._launch, graph)
            result, stopwatch.result = stopwatch.result, None
            is_slow = count is not None and count.were_slow(run_ns * len(runs))
            if count is not None:
                self._faulted = bool(mostly_fresh(count.faults * pages.PAGE, max(self.result_bytes * len(runs), LARGE)))
            if self.check_kept is not None and graph is None:
                self._keep_by_chance(index, result, runs[-1])
            del result
            if self.mutates and self._size == 1:
                # not before the next run, when the arguments would be in the cache
                inputs.restore()
            if stopwatch.method == CONTINUOUS and self._size == 1:
                self._size = min(block_size(run_ns), self.most_in_block())
            if not is_slow or attempt == MOST_SLOW:
                break
            # a repeated run finds the memory that was slow to get
            self.drop()
        self.samples.spent_ns += perf_counter_ns() - began
        return (index, self._faulted), run_ns

    def _keep_by_chance(self, index: int, result: Any, arguments: Arguments) -> None:
        # each run is kept with the same probability (reservoir sampling)
        self._finished += 1
        place = len(self._kept) if len(self._kept) < MOST_KEPT else secrets.randbelow(self._finished)
        if place < MOST_KEPT:
            # arguments get their earlier values again
            kept = RunOutputs.of(result, arguments, self.mutates, copies=self.mutates)
            self._kept[place : place + 1] = [(index, kept)]

    def check_results(self) -> None:
        check, self.check_kept = self.check_kept, None
        assert check is not None, "its results are checked once"
        check(self._kept)
        self._kept.clear()

    def time_apart(self, stopwatch: Stopwatch, prepare: Callable[[], None]) -> tuple[int, int]:
        state = self._size, self._launch, self.samples.spent_ns
        # launches take longer while a profiler records them
        self._size, self._launch = 1, self._launch_apart
        try:
            self.time(stopwatch, prepare)
        finally:
            self._size, self._launch, self.samples.spent_ns = state
        return self._began_ns, time_ns()

    def memory_uses(self, place: CallPosition, used: int, device: str) -> list[MemoryUse]:
        """List what to use before the next run, so that its memory is in the caches as it was in the program.

        used : number of bytes that this process has used
        """
        assert self.inputs is not None, "they are chosen before"
        inputs = self.inputs
        uses = [
            MemoryUse.of(inputs.memory_of(number), distance, used - inputs.used_at[number])
            for number, distance in enumerate(place.distances)
            if distance is not None
        ]
        if place.of_result is not None and self.result_bytes:
            write = partial(_write, self.result_bytes, device)
            uses.append(MemoryUse(self.result_bytes, write, place.of_result, used - self.used_at))
        if self.enter is not None and uses:
            # it has memory of its own, which was just written, or which only a run uses
            distance = max(use.distance for use in uses)
            if self.enters_each_run or self.mutates:
                uses.append(MemoryUse(0, lambda: None, distance, 0))
            else:
                args, kwargs = self._latest
                again = partial(self.function, *args, **kwargs)
                uses.append(MemoryUse(self.used_bytes, again, distance, used - self.used_at))
        elif place.of_code is not None and len(self._input_set.sets) > 1:
            other = partial(self._run_other, self._input_set)
            uses.append(MemoryUse(self.used_bytes, other, place.of_code, used - self.used_at))
        return uses

    def run_apart(self, run: Callable[[], None]) -> None:
        """Call `run` outside of the NVTX range of this function."""
        self._ready.end()
        run()
        self._ready.begin()

    def _run_other(self, input_set: InputSet) -> None:
        self.inputs = input_set.rotate(self._timed)
        if self.mutates and self.inputs is self._timed:
            # the timed run needs the initial values
            return
        args, kwargs = self._arguments(input_set, 1)[0]
        self.function(*args, **kwargs)

    def keep(self, run: Run, slowed: bool = False) -> None:
        self.samples.add(run.stratum, run.time_ns)
        self.samples.slowed += slowed
        self.runs.append(run)

    def keep_contended(self, run: Run) -> None:
        self.samples.add_contended(run.stratum, run.time_ns)
        self._dropped.begin()
        self._dropped.end()

    def drop(self) -> None:
        self.samples.dropped += 1
        self._dropped.begin()
        self._dropped.end()

    @property
    def block(self) -> int:
        return self._size

    def most_in_block(self) -> int:
        if not self.mutates and not self.enters_each_run:
            return 1 << 30
        size = max(max(input_set.sets[0].nbytes for input_set in self.input_sets), 1)
        return max(1, min(COPIES, COPIED_BYTES // size))

    def _graph_of(self, index: int, stopwatch: Stopwatch) -> Any:
        key = index, id(self.input_sets[index].sets[0])
        if key not in self._graphs:
            self._graphs[key] = stopwatch.capture(self.function, self._arguments(self.input_sets[index], self._size))
        return self._graphs[key]

    def _shares(self) -> dict[Any, float]:
        share = self.fresh or 0.0
        both = {True: share, False: 1 - share}
        shares = self.shares or [1.0] * len(self.input_sets)
        return {
            (index, fresh): own * part for index, own in enumerate(shares) for fresh, part in both.items() if own * part
        }

    def _arguments(self, input_set: InputSet, count: int) -> list[Arguments]:
        if not self.mutates:
            ready = input_set.ready[:1] * count
            if self.enter is None or not self.enters_each_run:
                return ready
        else:
            while len(input_set.sets) < count:
                input_set.sets.append(input_set.sets[0].copy())
            for inputs in input_set.sets[:count]:
                if inputs.is_changed:
                    inputs.restore()
                inputs.is_changed = True
            ready = [inputs.make() for inputs in input_set.sets[:count]]
        return ready if self.enter is None else [self.enter(arguments) for arguments in ready]


def _write(size: int, device: str) -> None:
    # a result of this size gets the memory that is freed here
    torch.empty(size, dtype=torch.uint8, device=device).fill_(0)


def paired_runs(runs: Sequence[Run], base: Sequence[Run]) -> list[tuple[Run, Run]]:
    run_of_round = {run.round: run for run in base}
    pairs = [(run, run_of_round[run.round]) for run in runs if run.round in run_of_round]
    with_values = [(run, other) for run, other in pairs if run.stratum[0] == other.stratum[0]]
    alike = [(run, other) for run, other in pairs if run.stratum == other.stratum]
    return next(found for found in (alike, with_values, pairs) if 2 * len(found) >= len(pairs))


MOST = 100  # maximum number of runs of a function, unless `--iterations` gives another
DEPTHS = 16  # number of depths of the C stack at which runs are timed, each of some hundred bytes


class TimedCase:
    def __init__(self, functions: Sequence[TimedFunction]) -> None:
        self.functions = list(functions)
        self._order = self.functions
        self._rounds = 0
        groups: dict[object, list[TimedFunction]] = {}
        for function in self.functions:
            groups.setdefault(id(function) if function.exchanges is None else function.exchanges, []).append(function)
        self._groups = list(groups.values())
        self._size = max(map(len, self._groups))

    @property
    def active(self) -> Iterator[TimedFunction]:
        return (function for function in self.functions if function.failure is None)

    def next_round(self, generator: Random) -> list[TimedFunction]:
        """Exchange the functions' arguments for the next round, and return the functions in the order of their runs."""
        arrangement = self._rounds % (2 * self._size)
        if self._rounds == 0:
            self._order = generator.sample(self.functions, len(self.functions))
        frames = generator.randrange(DEPTHS)
        # runs of a round are compared, so they have the same values
        wanted = next((function.samples.next_stratum for function in self.active), None)
        for function in self.functions:
            function.round, function.arrangement, function.frames = self._rounds, arrangement, frames
            function.wanted = wanted
        for group in self._groups:
            # a failed function has released its arguments
            active = [function for function in group if function.failure is None]
            input_sets = [function.input_sets for function in active]
            for place, function in enumerate(active):
                function.input_sets, function.partners = input_sets[place - 1], active
        self._rounds += 1
        return self._order if arrangement < self._size else self._order[::-1]

    def needs_runs(self, effort: Effort) -> bool:
        most = MOST if effort.iterations is None else effort.iterations
        return any(function.samples.done(effort) is None and len(function.samples) < most for function in self.active)

    def lacks_quiet_runs(self, effort: Effort) -> bool:
        return any(function.samples.lacks_quiet_runs(effort) for function in self.active)

    def try_again(self) -> None:
        for function in self.functions:
            function.samples.try_again()

    def settle(self, effort: Effort) -> None:
        for function in self.functions:
            function.samples.settle(effort)


def timed_cases(functions: Iterable[TimedFunction]) -> list[TimedCase]:
    cases: dict[int, list[TimedFunction]] = {}
    for function in functions:
        cases.setdefault(function.number, []).append(function)
    return [TimedCase(own) for own in cases.values()]
