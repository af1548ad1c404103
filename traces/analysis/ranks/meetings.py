"""Collectives of several ranks, matched: who was when in which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opgrip.traces.analysis.ranks.operators import Collective
from opgrip.traces.analysis.ranks.scan import Events

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Meetings:
    """Takings part in collectives, a row each, sorted by collective; (N,) all.

    Attributes
    ----------
    first : where the rows of each collective begin, (M,)
    process : whose row it is
    kind, group : numbers of names in `kinds` and `groups`
    root : the process that is the root; -1 without one
    signature, start_ns, launched_ns, wait_ns, end_ns : as `Events` has them
    unmatched : takings part that no other rank's trace has
    """

    kinds: tuple[str, ...]
    groups: tuple[str, ...]
    first: Integers
    process: Integers
    kind: Integers
    group: Integers
    root: Integers
    signature: Integers
    start_ns: Integers
    launched_ns: Integers
    wait_ns: Integers
    end_ns: Integers
    unmatched: int

    def __len__(self) -> int:
        return len(self.first)

    @property
    def number(self) -> Integers:
        """Of each row, its collective's."""
        return np.repeat(np.arange(len(self.first)), self.sizes)

    @property
    def sizes(self) -> Integers:
        """How many rows each collective has."""
        return np.diff(np.append(self.first, len(self.process)))


def match(
    events: Mapping[int, Events], collectives: Mapping[int, Mapping[int, Collective]], ranks: Sequence[int | None]
) -> Meetings:
    """The collectives that at least two processes took part in.

    They are matched by their group and their place among its collectives, which all members call in one order; those
    whose kinds differ there are unmatched, with all that follow in that group.

    Parameters
    ----------
    events : of each process, in the clock of all
    collectives : of each process, by signature
    ranks : of each process in the whole program
    """
    kinds, groups, roots = _Numbers(), _Numbers(), {rank: place for place, rank in enumerate(ranks) if rank is not None}
    pieces: list[Integers] = []
    for process, own in events.items():
        if not len(own):
            continue
        by_signature = collectives[process]
        table = {
            number: (kinds[item.kind], groups[item.group], -1 if item.root is None else roots.get(item.root, -1))
            for number, item in by_signature.items()
        }
        facts = np.array([table[number] for number in own.signature.tolist()], dtype=np.int64)
        columns = (own.ordinal, own.signature, own.start_ns, own.launched_ns, own.wait_ns, own.end_ns)
        pieces.append(np.column_stack([np.full(len(own), process), facts, *columns]))
    rows = np.concatenate(pieces) if pieces else np.empty((0, 10), dtype=np.int64)
    rows = rows[np.lexsort((rows[:, 0], rows[:, 4], rows[:, 2]))]
    total = len(rows)
    rows = rows[_agreeing(rows)]
    new = np.any(np.diff(rows[:, [2, 4]], axis=0) != 0, axis=1)
    first = np.flatnonzero(np.append(True, new)) if len(rows) else np.empty(0, dtype=np.int64)
    # the fourth column, the ordinal, has done its work
    process, kind, group, root, _, signature, start, launched, wait, end = np.ascontiguousarray(rows.T)
    return Meetings(
        kinds=tuple(kinds.names),
        groups=tuple(groups.names),
        first=first,
        process=process,
        kind=kind,
        group=group,
        root=root,
        signature=signature,
        start_ns=start,
        launched_ns=launched,
        wait_ns=wait,
        end_ns=end,
        unmatched=total - len(rows),
    )


def _agreeing(rows: Integers) -> NDArray[np.bool_]:
    """Of rows by group and ordinal, those of collectives of several processes, up to where a group's kinds differ."""
    if not len(rows):
        return np.empty(0, dtype=np.bool_)
    kind, group, ordinal = rows[:, 1], rows[:, 2], rows[:, 4]
    first = np.flatnonzero(np.append(True, (np.diff(group) != 0) | (np.diff(ordinal) != 0)))
    sizes = np.diff(np.append(first, len(rows)))
    differs = np.maximum.reduceat(kind, first) != np.minimum.reduceat(kind, first)
    good = sizes > 1
    stop = np.full(int(group.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(stop, group[first][differs], ordinal[first][differs])
    return np.repeat(good & (ordinal[first] < stop[group[first]]), sizes)


class _Numbers:
    """Numbers for names, in the order in which they come."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))
