"""Looks again at some later calls of a signature, where values decide what a call costs or gives.

A program calls `nonzero` on a mask of one shape many times, and each time as many are true as there are. So the trace
has the values and results of a few of these calls, from early ones to late ones, and a replay runs them all in turn.
The calls between cost nothing: a call that is to be looked at gets another operator in its node for that one time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from time import perf_counter_ns

from opgrip.capture.program.capture_choices import VALUE_SHARE
from opgrip.capture.recording.thread_mode import ThreadMode
from opgrip.capture.signatures.predictions import LEARNT, NEVER, SIGHTINGS
from opgrip.capture.timing.place_times import ANY, PlaceKey

EARLY = frozenset({2, 4, 8})
"""Which calls of a signature are looked at among those that are looked up by their key."""
LATE = 32
"""Calls after which another is looked at; later on, after four times as many each."""
MOST_TRIES = 1000
"""Calls of a signature that wait for one in a place."""
MOST = 8
"""Looks at one signature, beside the first."""
ALLOWANCE_NS = 20_000_000
"""What they may take beside that, so that a short program is looked at too."""


class Look(Enum):
    """Why a call is looked at: for its values, or for those of its place."""

    NO = auto()
    VALUES = auto()
    PLACE = auto()


class Observations:
    """Which signatures are looked at again, and when.

    Parameters
    ----------
    share : of the program's time that looks may take; those beyond it wait for later calls

    Attributes
    ----------
    spent_ns : what the capture did in all beside the fast way of recording a call
    suspended : nothing is looked at
    """

    def __init__(self, share: float = VALUE_SHARE) -> None:
        self._share = share
        self._key_lookups: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()
        self._next: dict[int, int] = {}
        self._looks: Counter[int] = Counter()
        self._due: set[int] = set()
        self._places: dict[int, set[PlaceKey]] = {}
        self._tries: Counter[int] = Counter()
        self._learning = False
        self._early = EARLY
        self._own_ns = self._aside_ns = self.spent_ns = 0
        self.suspended = False
        self._began_ns = perf_counter_ns()
        self._idle_since_ns: int | None = None

    def set_idle(self, idle: bool) -> None:
        """Begin or end a time whose calls are not recorded, of which looks get no share."""
        now = perf_counter_ns()
        if idle and self._idle_since_ns is None:
            self._idle_since_ns = now
        elif not idle and self._idle_since_ns is not None:
            self._began_ns += now - self._idle_since_ns
            self._idle_since_ns = None

    def set_learning(self, learning: bool) -> None:
        """Look whatever it costs from now on; or, where that ends, at late calls alone, as early ones have been."""
        self._learning = learning
        # what learning cost is no debt of the steps after it
        self._own_ns = self._aside_ns = 0
        self._began_ns = perf_counter_ns()
        self._early = frozenset({2}) if learning else frozenset()
        if not learning:
            self._due.clear()

    def forget(self) -> None:
        """Begin anew with signatures that get other numbers."""
        for table in (self._key_lookups, self._calls, self._next, self._looks, self._places, self._tries):
            table.clear()
        self._due.clear()

    def want(self, number: int) -> None:
        """Look at a signature again, of which the first call has been."""
        if number not in self._next:
            self._key_lookups[number] = 1
            self._next[number] = LATE

    def sightings(self, number: int) -> int:
        """From which call of a signature on it need not be looked up by its key."""
        if number in self._next and self._key_lookups[number] + 1 < max(self._early, default=0):
            return NEVER
        return LEARNT if self._learning else SIGHTINGS

    def is_due(self, number: int) -> bool:
        """Whether this call, which is looked up by its key, is to be looked at."""
        if number in self._next:
            self._key_lookups[number] += 1
            if self._key_lookups[number] in self._early and self._looks[number] < MOST:
                self._due.add(number)
        return number in self._due or self.waits(number)

    def want_at(self, number: int, place: PlaceKey, modes: Sequence[ThreadMode]) -> None:
        """Look at the next recorded call of a signature in a place."""
        self._places.setdefault(number, set()).add(place)
        for mode in modes:
            mode.look_at(number)

    def waits(self, number: int) -> bool:
        """Whether calls of a signature are to be looked at in some place."""
        return number in self._places

    def take(self, number: int, here: Callable[[], PlaceKey]) -> Look:
        """Whether a call is still to be looked at, and what for: the first one that asks is.

        Parameters
        ----------
        here : tells the call's place
        """
        if number in self._due and self._is_affordable():
            self._due.discard(number)
            self._looks[number] += 1
            return Look.VALUES
        # the trace has no calls of steps in which the capture learns, and so not the place
        if number in self._places and not self._learning and self._is_affordable():
            return self._take_at(number, here())
        return Look.NO

    def _take_at(self, number: int, here: PlaceKey) -> Look:
        places = self._places[number]
        found = next((place for place in (here, (here[0], ANY)) if place in places), None)
        self._tries[number] += 1
        if found is not None:
            places.discard(found)
        if not places or self._tries[number] >= MOST_TRIES:
            del self._places[number]
        return Look.NO if found is None else Look.PLACE

    def spend(self, own_ns: int) -> None:
        """Take note of what a look cost."""
        self._own_ns += own_ns
        self.spent_ns += own_ns

    def set_aside(self, own_ns: int) -> None:
        """Take note of what the capture did beside looks, which is no time of the program."""
        self._aside_ns += own_ns
        self.spent_ns += own_ns

    def _is_affordable(self) -> bool:
        """Whether looks have taken less than their share of the time that the program had without them."""
        if self._learning or self.suspended:
            return not self.suspended
        program_ns = perf_counter_ns() - self._began_ns - self._own_ns - self._aside_ns
        return self._own_ns <= ALLOWANCE_NS + self._share * program_ns

    def count(self, signatures: Sequence[int], modes: Sequence[ThreadMode]) -> None:
        """Take note of calls that were made, and see that others are looked at in time."""
        counts = Counter(number for number in signatures if number in self._next)
        for number, count in counts.items():
            self._calls[number] += count
            if self._calls[number] >= self._next[number] and self._looks[number] < MOST:
                self._next[number] = 4 * self._calls[number]
                self._due.add(number)
                for mode in modes:
                    mode.look_at(number)
