"""Replays cases again, each time in new processes: so often, or until it is sure how they differ from another run's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import count

from opgrip.replay.modes import EAGER
from opgrip.replay.outcome import Results
from opgrip.replay.results.ratios import with_ratios
from opgrip.replay.results.repeats import join_repeats
from opgrip.replay.results.results import Result

MOST = 20
"""Repeats of a case that is not decided."""

ByCase = dict[int, list[Result]]
RunOnce = Callable[[Collection[int], str], ByCase]
"""Replays the cases of some numbers; the text says which time it is."""


def repeat(
    first: Mapping[int, list[Result]], run_once: RunOnce, repeats: int, base: Results | None, reference: str = EAGER
) -> ByCase:
    """The rows of all cases, each of all of its repeats.

    Parameters
    ----------
    first : rows of a first replay, by the numbers of their cases
    repeats : how often every case is replayed, the first time included
    base : those of another run: cases of which it is not sure whether they differ are then repeated further
    reference : the mode that others are compared with
    """
    joined = {number: list(rows) for number, rows in first.items()}
    if not joined:
        return joined
    for time in range(2, repeats + 1):
        _add(joined, run_once(joined.keys(), f"repeat {time} of {repeats}"), reference)
    if base is None:
        return joined
    for time in count(repeats + 1):
        undecided = _undecided(base, joined)
        if not undecided or time > MOST:
            return joined
        _add(joined, run_once(undecided, f"repeat {time}"), reference)
    raise AssertionError("counting ends nowhere")


def _add(joined: ByCase, new: Mapping[int, list[Result]], reference: str) -> None:
    for number, rows in new.items():
        both = [join_repeats([before, row]) for before, row in zip(joined[number], rows, strict=True)]
        joined[number] = with_ratios(both, reference)


def _undecided(base: Results, joined: Mapping[int, list[Result]]) -> set[int]:
    from opgrip.replay.compare import compare

    comparison = compare(base, Results([row for rows in joined.values() for row in rows], {}))
    # the base stays as it is: of a case that it ran once, no number of repeats makes sure
    return {pair.new.case for pair in comparison.pairs if pair.more_new_runs is not None}
