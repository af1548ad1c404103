"""Runs subjects until their times are known: side by side in rounds, as a program mixes its calls, or one by one."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import torch

from opgrip.replay.cases.surroundings import BEFORE, Place
from opgrip.replay.operators.contexts import restored
from opgrip.replay.operators.devices import check_use
from opgrip.replay.timing.clock import Pace
from opgrip.replay.timing.options import Effort
from opgrip.replay.timing.samples import FEWEST
from opgrip.replay.timing.stopwatch import Stopwatch
from opgrip.replay.timing.subjects import NOWHERE, Stratum, Subject
from opgrip.traces.contention import Contention

MOST = 100
"""Runs of a subject at most."""
MOST_DROPPED = 3 * FEWEST
"""Runs of a subject that are dropped at most; where their number is given, as many as that. A machine that is always
slowed down is measured as it is, and its rows say so."""
LONG_NS = 100_000_000
"""Runs that take longer are not made again."""
CHECK_NS, CHECK_RUNS = 2_000_000, 10
"""Time of runs, and their number, after which the processor's pace is checked."""

NO_ROW = -1

Announce = Callable[[int, int], None]
"""Is told the number of each case before anything of it runs, and for which of its rows."""


@dataclass(frozen=True, slots=True)
class Group:
    """Subjects that run under the same settings of torch.

    Attributes
    ----------
    grad : whether calls make a graph
    around : subjects by the number of their case, that are run before others without being measured
    """

    settings: Mapping[str, Any]
    grad: bool
    subjects: list[Subject]
    around: Mapping[int, Subject] = field(default_factory=dict)


class Measurer:
    """Measures groups of subjects.

    Parameters
    ----------
    announce : is told what runs, before it does
    flush : empties the caches; None to leave them as they are
    """

    def __init__(
        self,
        stopwatch: Stopwatch,
        effort: Effort,
        flush: Callable[[], None] | None,
        announce: Announce,
        seed: int = 0,
    ) -> None:
        self.effort = effort
        self._stopwatch = stopwatch
        self._flush = flush
        self._announce = announce
        self._pace = Pace()
        self._contention: Contention | None = None
        self._most_dropped = MOST_DROPPED if effort.iterations is None else effort.iterations
        self._random = random.Random(seed)
        self._pending: list[tuple[Subject, Stratum, float]] = []
        self._pending_ns = 0.0

    def one_by_one(self, groups: Sequence[Group]) -> Iterator[list[Subject]]:
        """Run the subjects of each case in turn until each is done, then the next case's.

        Gives the subjects that a group has of a case, as soon as all of them are done.
        """
        with self._attentive():
            for group in groups:
                for case in _by_case(group.subjects):
                    with restored(group.settings), torch.set_grad_enabled(group.grad):
                        while self._again(case):
                            for subject in case:
                                if subject.failure is None:
                                    self._run(subject)
                            self._check(all_of_them=False)
                        self._check()
                    yield case

    def in_rounds(self, groups: Sequence[Group]) -> Iterator[list[Subject]]:
        """Run every subject once a round, each after those that its call came after in the program, until all are done.

        Subjects of one case are compared round by round. Gives those that a group has of a case, as `one_by_one`.
        """
        waiting = [(group, _by_case(group.subjects)) for group in groups]
        with self._attentive():
            while any(cases for _, cases in waiting):
                for group, cases in waiting:
                    if cases:
                        self._round(group, cases)
                        self._check()
                        yield from (case for case in cases if not self._again(case))
                        cases[:] = [case for case in cases if self._again(case)]

    @contextmanager
    def _attentive(self) -> Iterator[None]:
        with no_garbage_collection(), closing(Contention()) as self._contention:
            yield

    def _round(self, group: Group, cases: Sequence[Sequence[Subject]]) -> None:
        places = [self._random.choice(case[0].places) for case in cases]
        shuffled = (self._random.sample(case, len(case)) for case in cases)
        turns = [(place, subject) for place, case in zip(places, shuffled, strict=True) for subject in case]
        # in the program's order, so that what runs before a call has mostly just been run
        turns.sort(key=lambda turn: turn[0].position)
        just_run: deque[int] = deque(maxlen=BEFORE)
        with restored(group.settings), torch.set_grad_enabled(group.grad):
            for place, subject in turns:
                if subject.failure is not None:
                    continue
                if tuple(just_run)[-len(place.before) :] != place.before:
                    began = perf_counter_ns()
                    self._run_before(place, group)
                    subject.samples.spent_ns += perf_counter_ns() - began
                self._run(subject, place)
                just_run.extend((*place.before, subject.number))
                self._check(all_of_them=False)

    def _run_before(self, place: Place, group: Group) -> None:
        for number in place.before:
            before = group.around.get(number)
            if before is None or before.failure is not None:
                continue
            self._announce(number, NO_ROW)
            try:
                before.run_before()
                # what a device says of it only now is not the next one's
                self._stopwatch.synchronize()
            except Exception as error:
                self._fail(before, error)

    def _run(self, subject: Subject, place: Place = NOWHERE) -> None:
        self._announce(subject.number, subject.row)
        try:
            stratum, time_ns = subject.time(self._stopwatch, self._flush, place.recent)
        except Exception as error:
            self._fail(subject, error)
            return
        self._pending.append((subject, stratum, time_ns))
        self._pending_ns += time_ns

    def _fail(self, subject: Subject, error: Exception) -> None:
        check_use(self._stopwatch.device, error)
        subject.fail(error, self._stopwatch.device)

    def _check(self, all_of_them: bool = True) -> None:
        """Keep the runs since the last check, or drop them where the processor was slowed down or taken meanwhile.

        Parameters
        ----------
        all_of_them : else only where there are enough to make it worth while
        """
        enough = self._pending_ns >= CHECK_NS or len(self._pending) >= CHECK_RUNS
        if not self._pending or not (all_of_them or enough or self.effort.iterations is not None):
            return
        assert self._contention is not None, "it is opened before anything runs"
        # both are asked, since each tells of what passed since it was asked last
        slowed = any([self._pace.is_slowed(), self._contention.is_contended()])
        for subject, stratum, time_ns in self._pending:
            if slowed and subject.samples.dropped < self._most_dropped and time_ns < LONG_NS:
                subject.drop()
            else:
                subject.keep(stratum, time_ns, slowed)
        self._pending.clear()
        self._pending_ns = 0.0

    def _again(self, case: Sequence[Subject]) -> bool:
        """Whether a case needs more runs; its modes get as many as each other."""
        most = MOST if self.effort.iterations is None else self.effort.iterations
        return any(
            subject.failure is None and subject.samples.done(self.effort) is None and len(subject.samples) < most
            for subject in case
        )


def _by_case(subjects: Sequence[Subject]) -> list[list[Subject]]:
    cases: dict[int, list[Subject]] = {}
    for subject in subjects:
        cases.setdefault(subject.number, []).append(subject)
    return list(cases.values())


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Measured code is not interrupted to look for garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
