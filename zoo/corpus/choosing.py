"""Chooses the few that stand for many: facility location, by the greedy method with lazy evaluation.

The sum over all points of their weight times how like they are to the most similar chosen one is submodular and grows
with each choice, so the greedy choice comes within 1 - 1/e of the best: G. L. Nemhauser, L. A. Wolsey, M. L. Fisher,
"An analysis of approximations for maximizing submodular set functions", Mathematical Programming 14 (1978) 265-294.
That a gain only falls, so that most need not be reckoned again: M. Minoux, "Accelerated greedy algorithms for
maximizing submodular set functions", Optimization Techniques (1978) 234-243.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Wholes = NDArray[np.int64]
MOST_CANDIDATES = 3000
"""Of a group that may be chosen: the heaviest."""
MOST_PAIRS = 250_000_000
"""Of candidates and points whose likeness is kept, in 4 bytes each: of very many points fewer may be chosen."""
AT_ONCE = 256
"""Candidates that are compared with all points of their group at a time."""


@dataclass(frozen=True, slots=True)
class Points:
    """What is chosen from.

    Attributes
    ----------
    numbers : (N, D)
    kinds : (N,)
    apart : distance of two that are alike but for their kind
    """

    numbers: Floats
    kinds: Wholes
    apart: float = 0.0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, places: Any) -> Points:
        return Points(self.numbers[places], self.kinds[places], self.apart)


def choose(points: Points, groups: Wholes, weights: Floats, count: int) -> list[int]:
    """The places of those that are chosen, the one that stands for most first.

    Parameters
    ----------
    points : N of them, whose distance of 1 makes them 1/e alike
    groups : (N,); points of different groups are not alike at all
    weights : (N,)
    count : as many are chosen, or all that may be where these are fewer
    """
    most = max(1, min(MOST_CANDIDATES, MOST_PAIRS // max(len(points), 1)))
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    parts = [_Part(own, points, weights, most) for own in members if len(own)]
    heap = [(-gain, number, place, 0) for number, part in enumerate(parts) for place, gain in enumerate(part.gains)]
    heapify(heap)
    chosen: list[int] = []
    while heap and len(chosen) < min(count, len(points)):
        _, number, place, version = heap[0]
        part = parts[number]
        if place in part.chosen:
            heapreplace(heap, (1.0, number, place, version))
            if heap[0][0] > 0:
                break
        elif version == len(part.chosen):
            part.choose(place)
            chosen.append(int(part.candidates[place]))
            heapreplace(heap, (1.0, number, place, version))
        else:
            heapreplace(heap, (-part.gain(place), number, place, len(part.chosen)))
    return chosen


class _Part:
    """A group's points, and what of them is stood for by now.

    Attributes
    ----------
    candidates : the places of those that may be chosen
    gains : what choosing each would add where none is chosen
    """

    def __init__(self, members: Wholes, points: Points, weights: Floats, most: int) -> None:
        heaviest = np.argsort(-weights[members], kind="stable")[:most]
        self.candidates = members[heaviest]
        self.chosen: set[int] = set()
        self._weights = weights[members]
        self._likeness: NDArray[Any] = np.empty((len(self.candidates), len(members)), "f4")
        self.gains: list[float] = []
        for first in range(0, len(self.candidates), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            likeness = np.exp(-distances(points[self.candidates[some]], points[members]))
            self._likeness[some] = likeness
            self.gains.extend((likeness @ self._weights).tolist())
        self._best = np.zeros(len(members))

    def gain(self, place: int) -> float:
        """What choosing a candidate would add now."""
        return float(np.clip(self._likeness[place] - self._best, 0, None) @ self._weights)

    def choose(self, place: int) -> None:
        """Take one in."""
        self.chosen.add(place)
        self._best = np.maximum(self._best, self._likeness[place])


def distances(points: Points, others: Points) -> Floats:
    """(N, M), between each two."""
    own, theirs = points.numbers, others.numbers
    squares = (own**2).sum(axis=1)[:, None] + (theirs**2).sum(axis=1)[None, :] - 2 * own @ theirs.T
    squares += points.apart**2 * (points.kinds[:, None] != others.kinds[None, :])
    lengths: Floats = np.sqrt(np.clip(squares, 0, None))
    return lengths
