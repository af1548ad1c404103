"""Which unit a call belongs to: the module that it was made in, or the Python function."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath

from opgrip.replay.cases import Selection
from opgrip.traces import Trace
from opgrip.traces.records import Scope

CALL, FUNCTION, MODULE = "call", "function", "module"
UNIT_KINDS = (CALL, FUNCTION, MODULE)
"""What a case can be made of: one call, or all calls of a function or a module."""

OUTSIDE = "(outside)"
"""Name of the unit of calls that no module, or no function of the program, made."""

_CALLER = re.compile(r"(.*):\d+ (.*)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where calls are made, as far as units tell them apart.

    Attributes
    ----------
    name : of the unit: a module's path, or `file-stem:function`
    file : of the function; empty for a module
    around : the frames around the function, from the inside, as far as they were recorded
    """

    name: str
    phase: str
    file: str = ""
    around: tuple[str, ...] = ()

    def goes_on(self, other: Place) -> bool:
        """Whether a call that was made at another place right after belongs to the same run of the unit.

        Of a call further inside, fewer of the frames around the unit are recorded.
        """
        if (self.name, self.phase, self.file) != (other.name, other.phase, other.file):
            return False
        return all(mine == its for mine, its in zip(self.around, other.around, strict=False))


def make_places(trace: Trace, unit: str, selection: Selection) -> dict[int, Place]:
    """By number of a scope, the place of its calls; without those that the selection leaves out.

    A call in a backward pass has the place of the forward call that caused it, in a phase of its own.
    """
    by_number = {scope.number: scope for scope in trace.scopes}
    find = _module if unit == MODULE else _function
    found: dict[int, Place] = {}
    for scope in trace.scopes:
        origin = scope if scope.forward is None else by_number.get(scope.forward, scope)
        place = find(origin, scope.phase, selection)
        if place is not None:
            found[scope.number] = place
    return found


def names_of(places: Mapping[int, Place]) -> dict[int, str]:
    """By number of a scope, the name of its unit."""
    return {number: place.name for number, place in places.items()}


def _module(scope: Scope, phase: str, selection: Selection) -> Place | None:
    path = _selected_path(scope.module, selection.modules) if selection.modules else scope.module
    if path is None:
        return None
    name = path or (scope.module_type if not scope.module else "") or OUTSIDE
    return Place(name, phase) if _matches(name, selection.ops) else None


def _selected_path(path: str, patterns: Sequence[str]) -> str | None:
    """The outermost of the modules around a call, itself included, that a pattern matches."""
    parts = path.split(".") if path else []
    if "" in patterns or (not parts and _matches("", patterns)):
        # the root matches `*` too, but only calls of its own are meant
        return ""
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if _matches(prefix, patterns)), None)


def _function(scope: Scope, phase: str, selection: Selection) -> Place | None:
    if not _matches(scope.module, selection.modules):
        return None
    frames = [(scope.file, scope.function)]
    frames += [(match[1], match[2]) for match in map(_CALLER.fullmatch, scope.callers) if match is not None]
    for depth, (file, function) in enumerate(frames):
        name = f"{PurePath(file).stem}:{function}" if function else OUTSIDE
        if _matches(name, selection.ops):
            return Place(name, phase, file, scope.callers[depth:])
    return None


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
