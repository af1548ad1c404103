"""Repeated observations of a signature whose values decide what a call costs or returns.

A program may call `nonzero` many times on a mask of one shape, with a different number of true elements each time. The
trace therefore keeps the values and results of several of these calls, from early to late, and a replay runs all of
them in turn. Calls that are not observed cost nothing extra: a call that is due for an observation gets a different
operator in its node for that one time.
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
"""calls of a signature to observe, counted among the calls that are looked up by their key"""
LATE = 32
"""calls until the first late observation; each later one is due after four times as many calls"""
MOST_TRIES = 1000
"""calls of a signature to check for a match with the requested call sites before giving up"""
MOST = 8
"""maximum number of observations of one signature after its first call"""
ALLOWANCE_NS = 20_000_000
"""time that observations may take in addition to their share, so that short programs are observed too"""


class Look(Enum):
    """Reason for observing a call: its values, or the values at its call site."""

    NO = auto()
    VALUES = auto()
    PLACE = auto()


class Observations:
    """Schedule of the repeated observations of signatures.

    Parameters
    ----------
    share : share of the program's time that observations may take; observations beyond it wait for later calls

    Attributes
    ----------
    spent_ns : total time of the capture's own work outside the fast path that records a call
    suspended : True if nothing is observed
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
        """Start or end an interval in which calls are not recorded; it does not count towards the time for
        observations.
        """
        now = perf_counter_ns()
        if idle and self._idle_since_ns is None:
            self._idle_since_ns = now
        elif not idle and self._idle_since_ns is not None:
            self._began_ns += now - self._idle_since_ns
            self._idle_since_ns = None

    def set_learning(self, learning: bool) -> None:
        """Start or stop learning. While learning, observations have no time limit; afterwards only late calls are
        observed.
        """
        self._learning = learning
        # the time spent on learning must not reduce the time for observations in later steps
        self._own_ns = self._aside_ns = 0
        self._began_ns = perf_counter_ns()
        self._early = frozenset({2}) if learning else frozenset()
        if not learning:
            self._due.clear()

    def forget(self) -> None:
        """Clear all tables, because signatures get new numbers."""
        for table in (self._key_lookups, self._calls, self._next, self._looks, self._places, self._tries):
            table.clear()
        self._due.clear()

    def want(self, number: int) -> None:
        """Request further observations of a signature after its first call."""
        if number not in self._next:
            self._key_lookups[number] = 1
            self._next[number] = LATE

    def sightings(self, number: int) -> int:
        """Return the number of calls after which a signature need not be looked up by its key."""
        if number in self._next and self._key_lookups[number] + 1 < max(self._early, default=0):
            return NEVER
        return LEARNT if self._learning else SIGHTINGS

    def is_due(self, number: int) -> bool:
        """Count a call that is looked up by its key; return True if it is due for an observation."""
        if number in self._next:
            self._key_lookups[number] += 1
            if self._key_lookups[number] in self._early and self._looks[number] < MOST:
                self._due.add(number)
        return number in self._due or self.waits(number)

    def want_at(self, number: int, place: PlaceKey, modes: Sequence[ThreadMode]) -> None:
        """Request an observation of the next recorded call of a signature at a call site."""
        self._places.setdefault(number, set()).add(place)
        for mode in modes:
            mode.look_at(number)

    def waits(self, number: int) -> bool:
        """Return True if an observation of a signature at a call site is pending."""
        return number in self._places

    def take(self, number: int, here: Callable[[], PlaceKey]) -> Look:
        """Return the reason for observing a call, and mark that observation as done.

        If several threads ask, only the first one gets the observation.

        Parameters
        ----------
        here : returns the call site of the call
        """
        if number in self._due and self.is_affordable():
            self._due.discard(number)
            self._looks[number] += 1
            return Look.VALUES
        # calls of learning steps are not in the trace, so their call sites are not either
        if number in self._places and not self._learning and self.is_affordable():
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
        """Add the time that an observation took."""
        self._own_ns += own_ns
        self.spent_ns += own_ns

    def set_aside(self, own_ns: int) -> None:
        """Add time of the capture's own work other than observations, which does not count as the program's time."""
        self._aside_ns += own_ns
        self.spent_ns += own_ns

    def is_affordable(self) -> bool:
        """Return True if observations have taken less than their share of the program's time without them."""
        if self._learning or self.suspended:
            return not self.suspended
        program_ns = perf_counter_ns() - self._began_ns - self._own_ns - self._aside_ns
        return self._own_ns <= ALLOWANCE_NS + self._share * program_ns

    def count(self, signatures: Sequence[int], modes: Sequence[ThreadMode]) -> None:
        """Count calls that were made, and schedule the late observations that become due."""
        counts = Counter(number for number in signatures if number in self._next)
        for number, count in counts.items():
            self._calls[number] += count
            if self._calls[number] >= self._next[number] and self._looks[number] < MOST:
                self._next[number] = 4 * self._calls[number]
                self._due.add(number)
                for mode in modes:
                    mode.look_at(number)
