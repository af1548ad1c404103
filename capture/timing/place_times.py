"""How long a signature's calls take from place to place: where they differ, the values of one place are not enough.

The square root of an optimizer's state takes five times as long for a parameter of which most gradients are zero: one
signature, one line of the program, other memory. So a place is a scope and the memory of the first tensor, where that
comes again, as parameters and states do; else the scope alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DIFFERENT, LEAST_NS = 1.5, 20_000
"""Places behave differently where one's time is so many times another's, and so much longer."""
MOST_PLACES = 48
"""Of a signature: so many scopes, and so many memories of first tensors."""
FASTEST, SLOWEST, SLOWEST_ONCE = 4, 6, 12
"""Places that are kept where there are more: of those where calls came again, and of those with a single call, more of
the slow ones, as some of them were but interrupted."""
MOST_CALLS_BETWEEN = 2048
"""Calls of a signature after which a place with one call is not expected again."""
MOST_SIGNATURES = 10_000
MOST_LOOKS = 4
"""Places of a signature that are looked at."""

PlaceKey = tuple[int, int]
"""Scope, and the memory of the first tensor; `ANY` for all that comes once."""
ANY = -1


@dataclass(slots=True)
class _Seen:
    """Calls in one place: how many, the shortest of them, which is the least disturbed, and the number of the first."""

    count: int
    least_ns: int
    first: int


class _Table:
    """Some places of a signature, of many those with the shortest and the longest calls.

    Each step's activations live in other memory, and a model has many parameters of one shape, of which the last ones
    may be those that differ: neither the first places nor the last are the ones to keep.
    """

    __slots__ = ("_dull_from_ns", "_dull_to_ns", "_dull_until", "seen")

    def __init__(self) -> None:
        self.seen: dict[PlaceKey, _Seen] = {}
        self._forget_dull()

    def add(self, place: PlaceKey, duration_ns: int, call: int) -> None:
        """Take note of a call; calls are numbered."""
        seen = self.seen.get(place)
        if seen is None:
            if self._dull_from_ns <= duration_ns <= self._dull_to_ns and call < self._dull_until:
                return
            if len(self.seen) >= MOST_PLACES:
                self._thin_out(call)
            self.seen[place] = _Seen(1, duration_ns, call)
            return
        if seen.count == 1:
            # makes room among those with a single call
            self._forget_dull()
        seen.count += 1
        if duration_ns < seen.least_ns:
            seen.least_ns = duration_ns

    def _thin_out(self, call: int) -> None:
        """Keep the extremes of what came again, and of what still may."""
        oldest = call - MOST_CALLS_BETWEEN
        ranked = sorted(self.seen.items(), key=lambda item: item[1].least_ns)
        again = [item for item in ranked if item[1].count > 1]
        once = [item for item in ranked if item[1].count == 1 and item[1].first > oldest]
        self.seen = dict(_extremes(again, SLOWEST) + _extremes(once, SLOWEST_ONCE))
        if len(once) > FASTEST + SLOWEST_ONCE:
            # the next time they would go: sorting for each of them costs more than all else
            self._dull_from_ns, self._dull_to_ns = once[FASTEST - 1][1].least_ns, once[-SLOWEST_ONCE][1].least_ns
            self._dull_until = call + MOST_CALLS_BETWEEN

    def _forget_dull(self) -> None:
        self._dull_from_ns = self._dull_to_ns = self._dull_until = -1


def _extremes(ranked: list[tuple[PlaceKey, _Seen]], slowest: int) -> list[tuple[PlaceKey, _Seen]]:
    """The first and the last of many."""
    return ranked if len(ranked) <= FASTEST + slowest else [*ranked[:FASTEST], *ranked[-slowest:]]


class _Places:
    """The places of a signature.

    Attributes
    ----------
    looked_at : those that were
    """

    __slots__ = ("_by_memory", "_by_scope", "_calls", "looked_at")

    def __init__(self) -> None:
        self._by_scope, self._by_memory = _Table(), _Table()
        self._calls = 0
        self.looked_at: set[PlaceKey] = set()

    def __len__(self) -> int:
        return len(self._by_scope.seen) + len(self._by_memory.seen)

    def add(self, place: PlaceKey, duration_ns: int) -> None:
        """Take note of a call."""
        self._calls += 1
        self._by_scope.add((place[0], ANY), duration_ns, self._calls)
        self._by_memory.add(place, duration_ns, self._calls)

    def times_by_place(self) -> list[tuple[int, PlaceKey]]:
        """The shortest time in each place where calls came again, ascending."""
        with_memory = {place[0] for place, seen in self._by_memory.seen.items() if seen.count > 1}
        # a scope whose memory comes again is looked at by that
        scopes = (item for item in self._by_scope.seen.items() if item[0][0] not in with_memory)
        places = (*scopes, *self._by_memory.seen.items())
        return sorted((seen.least_ns, place) for place, seen in places if seen.count > 1)


class PlaceTimes:
    """Times of calls by signature and place."""

    def __init__(self) -> None:
        self._by_signature: dict[int, _Places] = {}

    def note(
        self,
        signatures: Sequence[int],
        scopes: Sequence[int],
        memory: Sequence[int],
        durations_ns: NDArray[np.int64],
    ) -> Iterator[tuple[int, PlaceKey]]:
        """Take note of calls; gives the signatures and places whose values are to be looked at.

        Parameters
        ----------
        memory : number of the memory of each call's first tensor
        """
        numbers = np.asarray(signatures, dtype=np.int64)
        # most operators of a program are so short that nothing of it matters
        long = np.unique(numbers[durations_ns >= LEAST_NS])
        if not len(long):
            return
        for index in np.flatnonzero(np.isin(numbers, long)).tolist():
            places = self._places_of(signatures[index])
            if places is not None:
                places.add((scopes[index], memory[index]), int(durations_ns[index]))
        for number in long.tolist():
            for place in self._different(number):
                yield number, place

    def _places_of(self, number: int) -> _Places | None:
        """Those of a signature; None where there are too many signatures."""
        places = self._by_signature.get(number)
        if places is None and len(self._by_signature) < MOST_SIGNATURES:
            places = self._by_signature[number] = _Places()
        return places

    def _different(self, number: int) -> Iterator[PlaceKey]:
        """Places of a signature that differ, one of each behaviour, as far as they were not looked at."""
        places = self._by_signature.get(number)
        if places is None or len(places.looked_at) >= MOST_LOOKS:
            return
        times = places.times_by_place()
        if not times or times[-1][0] < max(times[0][0] * DIFFERENT, times[0][0] + LEAST_NS):
            return
        last = 0
        for time, place in times:
            if time < last * DIFFERENT or len(places.looked_at) >= MOST_LOOKS:
                continue
            last = time
            if place not in places.looked_at:
                places.looked_at.add(place)
                yield place
