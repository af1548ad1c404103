"""How long a signature's calls take from place to place: where they differ, the values of one place are not enough.

The square root of an optimizer's state takes five times as long for a parameter of which most gradients are zero: one
signature, one line of the program, other memory. So a place is a scope and the memory of the first tensor, where that
comes again, as parameters and states do; else the scope alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

DIFFERENT, LEAST_NS = 1.5, 20_000
"""Places behave differently where one's time is so many times another's, and so much longer."""
MOST_PLACES = 32
"""Of a signature."""
MOST_SIGNATURES = 20_000
MOST_LOOKS = 4
"""Places of a signature that are looked at."""

Place = tuple[int, int]
"""Scope, and the memory of the first tensor; `ANY` for all that comes once."""
ANY = -1


@dataclass(slots=True)
class _Seen:
    """Calls in one place: how many, and the shortest of them, which is the least disturbed."""

    count: int = 0
    least_ns: int = 1 << 62


@dataclass(slots=True)
class _Places:
    """The places of a signature, and those that were looked at."""

    seen: dict[Place, _Seen] = field(default_factory=dict)
    looked_at: set[Place] = field(default_factory=set)


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
    ) -> Iterator[tuple[int, Place]]:
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
            self._add(signatures[index], (scopes[index], memory[index]), int(durations_ns[index]))
        for number in long.tolist():
            for place in self._different(number):
                yield number, place

    def _add(self, number: int, place: Place, duration_ns: int) -> None:
        places = self._by_signature.get(number)
        if places is None:
            if len(self._by_signature) >= MOST_SIGNATURES:
                return
            places = self._by_signature[number] = _Places()
        for key in (place, (place[0], ANY)):
            seen = places.seen.get(key)
            if seen is None:
                if len(places.seen) >= MOST_PLACES:
                    continue
                seen = places.seen[key] = _Seen()
            seen.count += 1
            seen.least_ns = min(seen.least_ns, duration_ns)

    def _different(self, number: int) -> Iterator[Place]:
        """Places of a signature that differ, one of each behaviour, as far as they were not looked at."""
        places = self._by_signature.get(number)
        if places is None or len(places.looked_at) >= MOST_LOOKS:
            return
        times = sorted((seen.least_ns, place) for place, seen in places.seen.items() if seen.count > 1)
        with_memory = {scope for _, (scope, memory) in times if memory != ANY}
        # a scope whose memory comes again is looked at by that
        times = [(time, place) for time, place in times if place[1] != ANY or place[0] not in with_memory]
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
