"""Timed cases: the subjects (functions to time) of one case, which take turns and exchange the memory of their
arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

from opgrip.replay.timing.subjects import Subject
from opgrip.replay.timing.timing_options import Effort

MOST = 100  # maximum number of runs of a subject, unless `--iterations` gives another
DEPTHS = 16  # number of depths of the C stack at which runs are timed, each of some hundred bytes


class TimedCase:
    """The functions of one case, which run once per round.

    A call may take 10 % longer if its arguments are in other memory, or if it runs second. Therefore n functions that
    may exchange arguments have cycles of 2n rounds: in each cycle, each function runs twice in the memory of each one,
    once in an order that is drawn for the case, and once in the reverse order. The round's position in its cycle is the
    arrangement of its runs.
    """

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self.subjects = list(subjects)
        self._order = self.subjects
        self._rounds = 0
        groups: dict[object, list[Subject]] = {}
        for subject in self.subjects:
            groups.setdefault(id(subject) if subject.exchanges is None else subject.exchanges, []).append(subject)
        self._groups = list(groups.values())
        self._size = max(map(len, self._groups))

    @property
    def active(self) -> Iterator[Subject]:
        return (subject for subject in self.subjects if subject.failure is None)

    def next_round(self, generator: Random) -> list[Subject]:
        """Exchange the functions' arguments for the next round, and return the functions in the order in which they
        run.
        """
        arrangement = self._rounds % (2 * self._size)
        if self._rounds == 0:
            self._order = generator.sample(self.subjects, len(self.subjects))
        frames = generator.randrange(DEPTHS)
        # runs of a round are compared, so they have the same values
        wanted = next((subject.samples.next_stratum for subject in self.active), None)
        for subject in self.subjects:
            subject.round, subject.arrangement, subject.frames = self._rounds, arrangement, frames
            subject.wanted = wanted
        for group in self._groups:
            # a failed subject has released its arguments
            active = [subject for subject in group if subject.failure is None]
            input_sets = [subject.input_sets for subject in active]
            for place, subject in enumerate(active):
                subject.input_sets, subject.partners = input_sets[place - 1], active
        self._rounds += 1
        return self._order if arrangement < self._size else self._order[::-1]

    def needs_runs(self, effort: Effort) -> bool:
        """Return True if a function lacks times; all functions of a case get the same number of runs."""
        most = MOST if effort.iterations is None else effort.iterations
        return any(subject.samples.done(effort) is None and len(subject.samples) < most for subject in self.active)

    def lacks_quiet_runs(self, effort: Effort) -> bool:
        return any(subject.samples.lacks_quiet_runs(effort) for subject in self.active)

    def try_again(self) -> None:
        for subject in self.subjects:
            subject.samples.try_again()

    def settle(self, effort: Effort) -> None:
        for subject in self.subjects:
            subject.samples.settle(effort)


def timed_cases(subjects: Iterable[Subject]) -> list[TimedCase]:
    """Return the cases of the functions, in the order of their first functions."""
    cases: dict[int, list[Subject]] = {}
    for subject in subjects:
        cases.setdefault(subject.number, []).append(subject)
    return [TimedCase(own) for own in cases.values()]
