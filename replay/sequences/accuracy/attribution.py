"""Finds the calls that explain the error of a step's results, by replays in which only some calls run the variant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opgrip.replay.sequences.accuracy.judge import CallError

EXPLAINED = 0.9  # share of the error that a group of calls must explain
FEW = 5  # number of calls that are named one by one
CANCELLED = 0.5  # part of one call's effect below which the effect of several counts as cancelled
MOST = 1e3  # relative error that counts at most
CALLS, OPERATORS, MODULES = "calls", "operators", "modules"

# function that replays the step with the variant in some calls, and returns the relative errors of its results
Errors = Callable[[Callable[[int], bool]], Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class Attribution:
    """The calls that explain the error of the results.

    error : root mean square of the relative errors of the results
    kind : whether `names` are calls, operators or modules
    calls : indices of the calls; in an attribution to operators or modules, of the worst call of each
    explained : share of the error that vanishes if these calls run as in the reference
    cancelled : error that the first call causes alone, if the others cancel it; else 0
    """

    error: float
    kind: str
    names: tuple[str, ...]
    calls: tuple[int, ...]
    count: int
    explained: float
    cancelled: float = 0.0


def score(errors: Mapping[int, float]) -> float:
    return sqrt(sum(min(error, MOST) ** 2 for error in errors.values()) / max(len(errors), 1))


def attribute(calls: Sequence[CallError], errors: Mapping[int, float], errors_of: Errors) -> Attribution | None:
    """Return the fewest calls, or else operators or modules, that explain the error of the results.

    errors : relative errors of the results if all calls run the variant
    """
    wrong = sorted((call for call in calls if call.local), key=lambda call: (-call.is_local, -call.excess, call.index))
    whole = score(errors)
    if not wrong:
        return None
    if any(call.is_local for call in wrong) and (cancelling := _cancelling(wrong, whole, errors_of)) is not None:
        return cancelling
    if not whole:
        return None
    found = [_explain([[call] for call in wrong], CALLS, whole, errors_of)]
    keys: tuple[tuple[str, Callable[[CallError], Hashable]], ...] = (
        (OPERATORS, lambda call: call.op),
        (MODULES, lambda call: (call.module, call.phase)),
    )
    for kind, key in keys if len(found[0].calls) > FEW else ():
        groups: dict[Hashable, list[CallError]] = {}
        for call in wrong:
            groups.setdefault(key(call), []).append(call)
        found.append(_explain(list(groups.values()), kind, whole, errors_of))
    return min(found, key=lambda item: len(item.names))


def _cancelling(wrong: Sequence[CallError], whole: float, errors_of: Errors) -> Attribution | None:
    beyond = [call for call in wrong if call.is_local]
    if len(beyond) < 2:
        return None
    alone = score(errors_of(lambda index: index == beyond[0].index))
    if whole > CANCELLED * alone:
        return None
    low, high = 2, len(beyond)
    while low < high:
        middle = (low + high) // 2
        first = {call.index for call in beyond[:middle]}
        if score(errors_of(lambda index, first=first: index in first)) <= CANCELLED * alone:  # type: ignore[misc]
            high = middle
        else:
            low = middle + 1
    both = [beyond[0], beyond[low - 1]]
    names = tuple(call.op for call in both)
    return Attribution(whole, CALLS, names, tuple(call.index for call in both), 2, 1 - whole / alone, alone)


def _explain(groups: Sequence[Sequence[CallError]], kind: str, whole: float, errors_of: Errors) -> Attribution:
    remaining: dict[int, float] = {len(groups): 0.0}

    def rest(count: int) -> float:
        if count not in remaining:
            off = _indices(groups[:count])
            remaining[count] = score(errors_of(lambda index: index not in off))
        return remaining[count]

    low, high = 1, len(groups)
    # a single one is the most frequent answer
    if high > 1 and rest(1) <= (1 - EXPLAINED) * whole:
        high = 1
    while low < high:
        middle = (low + high) // 2
        if rest(middle) <= (1 - EXPLAINED) * whole:
            high = middle
        else:
            low = middle + 1
    chosen = groups[:low]
    if kind == CALLS:
        names = tuple(group[0].op for group in chosen)
    elif kind == OPERATORS:
        names = tuple(dict.fromkeys(group[0].op for group in chosen))
    else:
        names = tuple(f"{group[0].module or 'outside of modules'} {group[0].phase}" for group in chosen)
    worst = tuple(group[0].index for group in chosen)
    return Attribution(whole, kind, names, worst, len(_indices(chosen)), 1 - rest(low) / whole)


def _indices(groups: Collection[Sequence[CallError]]) -> set[int]:
    return {call.index for group in groups for call in group}
