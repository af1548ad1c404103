"""Times of a signature's calls per call site. If they differ, the values of one call site do not represent the others.

The square root of an optimizer's state takes five times as long for a parameter with mostly zero gradients, although
signature and source line are the same and only the memory differs. Therefore a call site is identified here by its
scope and, if it recurs, by the memory of the first tensor, as for parameters and optimizer states; otherwise by the
scope only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DIFFERENT, LEAST_NS = 1.5, 20_000
"""minimum ratio and minimum difference in ns of two call sites' times for the call sites to differ"""
MOST_PLACES = 48
"""maximum number of scopes, and of first-tensor memories, kept per signature"""
FASTEST, SLOWEST, SLOWEST_ONCE = 4, 6, 12
"""numbers of the fastest and the slowest call sites to keep if there are too many: slowest ones with several calls, and
slowest ones with a single call. More of the latter are kept, because some were only interrupted
"""
MOST_CALLS_BETWEEN = 2048
"""calls of a signature after which a call site with one call is not expected to recur"""
MOST_SIGNATURES = 10_000
MOST_LOOKS = 4
"""maximum number of call sites to observe per signature"""

PlaceKey = tuple[int, int]
"""scope and memory of the first tensor, or `ANY` for memory that does not recur"""
ANY = -1


@dataclass(slots=True)
class _Seen:
    """Calls at one call site: their number, the shortest duration, which is the least perturbed, and the first call's
    number.
    """

    count: int
    least_ns: int
    first: int


class _Table:
    """Some call sites of a signature; if there are too many, those with the shortest and the longest calls.

    Each step's activations use different memory, and a model has many parameters of the same shape, of which the last
    ones may be the ones that differ. Keeping only the first or the last call sites would therefore miss some.
    """

    __slots__ = ("_dull_from_ns", "_dull_to_ns", "_dull_until", "seen")

    def __init__(self) -> None:
        self.seen: dict[PlaceKey, _Seen] = {}
        self._forget_dull()

    def add(self, place: PlaceKey, duration_ns: int, call: int) -> None:
        """Add a call with a running number."""
        seen = self.seen.get(place)
        if seen is None:
            if self._dull_from_ns <= duration_ns <= self._dull_to_ns and call < self._dull_until:
                return
            if len(self.seen) >= MOST_PLACES:
                self._thin_out(call)
            self.seen[place] = _Seen(1, duration_ns, call)
            return
        if seen.count == 1:
            # a call site that recurs makes space for others with a single call
            self._forget_dull()
        seen.count += 1
        if duration_ns < seen.least_ns:
            seen.least_ns = duration_ns

    def _thin_out(self, call: int) -> None:
        """Keep only the extremes among recurring call sites, and among call sites that may still recur."""
        oldest = call - MOST_CALLS_BETWEEN
        ranked = sorted(self.seen.items(), key=lambda item: item[1].least_ns)
        again = [item for item in ranked if item[1].count > 1]
        once = [item for item in ranked if item[1].count == 1 and item[1].first > oldest]
        self.seen = dict(_extremes(again, SLOWEST) + _extremes(once, SLOWEST_ONCE))
        if len(once) > FASTEST + SLOWEST_ONCE:
            # Until then, ignore durations between the extremes. They would be removed the next time, and sorting for
            # each of them costs more than everything else here.
            self._dull_from_ns, self._dull_to_ns = once[FASTEST - 1][1].least_ns, once[-SLOWEST_ONCE][1].least_ns
            self._dull_until = call + MOST_CALLS_BETWEEN

    def _forget_dull(self) -> None:
        self._dull_from_ns = self._dull_to_ns = self._dull_until = -1


def _extremes(ranked: list[tuple[PlaceKey, _Seen]], slowest: int) -> list[tuple[PlaceKey, _Seen]]:
    """Return the first `FASTEST` and the last `slowest` entries."""
    return ranked if len(ranked) <= FASTEST + slowest else [*ranked[:FASTEST], *ranked[-slowest:]]


class _Places:
    """The call sites of a signature.

    Attributes
    ----------
    looked_at : call sites whose observation was requested
    """

    __slots__ = ("_by_memory", "_by_scope", "_calls", "looked_at")

    def __init__(self) -> None:
        self._by_scope, self._by_memory = _Table(), _Table()
        self._calls = 0
        self.looked_at: set[PlaceKey] = set()

    def __len__(self) -> int:
        return len(self._by_scope.seen) + len(self._by_memory.seen)

    def add(self, place: PlaceKey, duration_ns: int) -> None:
        """Add a call."""
        self._calls += 1
        self._by_scope.add((place[0], ANY), duration_ns, self._calls)
        self._by_memory.add(place, duration_ns, self._calls)

    def times_by_place(self) -> list[tuple[int, PlaceKey]]:
        """Return the shortest time at each recurring call site, in ascending order."""
        with_memory = {place[0] for place, seen in self._by_memory.seen.items() if seen.count > 1}
        # a scope whose memory recurs is represented by its memory
        scopes = (item for item in self._by_scope.seen.items() if item[0][0] not in with_memory)
        places = (*scopes, *self._by_memory.seen.items())
        return sorted((seen.least_ns, place) for place, seen in places if seen.count > 1)


class PlaceTimes:
    """Durations of calls by signature and call site."""

    def __init__(self) -> None:
        self._by_signature: dict[int, _Places] = {}

    def note(
        self,
        signatures: Sequence[int],
        scopes: Sequence[int],
        memory: Sequence[int],
        durations_ns: NDArray[np.int64],
    ) -> Iterator[tuple[int, PlaceKey]]:
        """Add calls; yield signatures and call sites whose values should be observed.

        Parameters
        ----------
        memory : number of the memory of each call's first tensor
        """
        numbers = np.asarray(signatures, dtype=np.int64)
        # most operators of a program are too short for differences to matter
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
        """Return the call sites of a signature, or None if there are too many signatures."""
        places = self._by_signature.get(number)
        if places is None and len(self._by_signature) < MOST_SIGNATURES:
            places = self._by_signature[number] = _Places()
        return places

    def _different(self, number: int) -> Iterator[PlaceKey]:
        """Yield one call site per timing cluster of a signature, except for those requested before."""
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
