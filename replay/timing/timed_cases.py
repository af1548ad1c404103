"""Timed cases: the functions (functions to time) of one case, which take turns and exchange the memory of their
arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

from opgrip.replay.timing.timed_functions import TimedFunction
from opgrip.replay.timing.timing_options import Effort

MOST = 100  # maximum number of runs of a function, unless `--iterations` gives another
DEPTHS = 16  # number of depths of the C stack at which runs are timed, each of some hundred bytes


class TimedCase:
    """The functions of one case, which run once per round.

    A call may take 10 % longer if its arguments are in other memory, or if it runs second. Therefore n functions that
    may exchange arguments have cycles of 2n rounds: in each cycle, each function runs twice in the memory of each one,
    once in an order that is drawn for the case, and once in the reverse order. The round's position in its cycle is the
    arrangement of its runs.
    """

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
        """Exchange the functions' arguments for the next round, and return the functions in the order in which they
        run.
        """
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
        """Return True if a function lacks times; all functions of a case get the same number of runs."""
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
    """Return the cases of the functions, in the order of their first functions."""
    cases: dict[int, list[TimedFunction]] = {}
    for function in functions:
        cases.setdefault(function.number, []).append(function)
    return [TimedCase(own) for own in cases.values()]
