"""The calls of a thread in runs: those that it made one after the other in one module or function."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from opgrip.traces.schema.records import Scope
from opgrip.traces.table.trace import Trace

OUTSIDE = "(outside)"
"""Name of the place of calls that no module, or no function of the program, made."""

_CALLER = re.compile(r"(.*):\d+ (.*)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where calls are made, as far as runs are told apart.

    Attributes
    ----------
    name : a module's path, or one that tells a function
    file : of the function; empty for a module
    around : the frames around the function, from the inside, as far as they were recorded
    """

    name: str
    phase: str
    file: str = ""
    around: tuple[str, ...] = ()

    def goes_on(self, other: Place) -> bool:
        """Whether a call that was made at another place right after belongs to the same run.

        Of a call further inside, fewer of the frames around the place are recorded.
        """
        if (self.name, self.phase, self.file) != (other.name, other.phase, other.file):
            return False
        return all(mine == its for mine, its in zip(self.around, other.around, strict=False))


class Placed(Protocol):
    """What was done at a place; None where that is of no interest."""

    @property
    def place(self) -> Place | None:
        """The place."""


P = TypeVar("P", bound=Placed)


def origins(trace: Trace) -> dict[int, Scope]:
    """By number of a scope, where its calls come from: those of a backward pass from the forward call behind them."""
    by_number = {scope.number: scope for scope in trace.scopes}
    return {
        scope.number: scope if scope.forward is None else by_number.get(scope.forward, scope) for scope in trace.scopes
    }


def frames_of(scope: Scope) -> list[tuple[str, str]]:
    """File and name of the functions around calls, from the inside, as far as they were recorded."""
    frames = [(scope.file, scope.function)]
    return frames + [(match[1], match[2]) for match in map(_CALLER.fullmatch, scope.callers) if match is not None]


def runs_of(calls: Iterable[P]) -> Iterator[tuple[Place, list[P]]]:
    """The calls of one thread, in runs; those without a place are in none, and end one."""
    run: list[P] = []
    around: Place | None = None
    for place, call, begins in in_runs(calls):
        if begins and around is not None:
            yield around, run
            run = []
        around = place
        run.append(call)
    if around is not None:
        yield around, run


def in_runs(calls: Iterable[P]) -> Iterator[tuple[Place, P, bool]]:
    """The calls of one thread that are in runs, each with its run's place so far, and whether it begins the run."""
    place: Place | None = None
    for call in calls:
        if place is not None and call.place is not None and place.goes_on(call.place):
            place = max(place, call.place, key=lambda item: len(item.around))
            yield place, call, False
            continue
        place = call.place
        if place is not None:
            yield place, call, True
