"""Which unit a call belongs to: the module that it was made in, or the Python function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath

from opgrip.replay.cases.cases import matches
from opgrip.replay.cases.selection import MODULE, Selection
from opgrip.replay.cases.ways import FORWARD
from opgrip.traces import Trace
from opgrip.traces.analysis.module_runs import OUTSIDE, Place, frames_of, origins
from opgrip.traces.schema.records import Scope


def make_places(trace: Trace, unit: str, selection: Selection) -> dict[int, Place]:
    """By number of a scope, the place of its calls; without those that the selection leaves out.

    A call in a backward pass has the place of the forward call that caused it, in a phase of its own.
    """
    origin = origins(trace)
    find = partial(_module, module_types(trace)) if unit == MODULE else _function
    place_of_scope: dict[int, Place] = {}
    for scope in trace.scopes:
        place = find(origin[scope.number], scope.phase, selection)
        if place is not None:
            place_of_scope[scope.number] = place
    return place_of_scope


def names_of(places: Mapping[int, Place]) -> dict[int, str]:
    """By number of a scope, the name of its unit."""
    return {number: place.name for number, place in places.items()}


def module_types(trace: Trace) -> dict[str, str]:
    """Return the class of each module that made calls, by its path."""
    return {scope.module: scope.module_type for scope in trace.scopes if scope.module_type}


def unit_name(place: Place, types: Mapping[str, str]) -> str:
    """Return the name of a unit with its class and, except for forward, its phase: `blocks.0 (Block) backward`.

    Parameters
    ----------
    types : of `module_types`; empty if units are functions
    """
    kind, phase = types.get(place.name), "" if place.phase == FORWARD else place.phase
    return " ".join(filter(None, (place.name, f"({kind})" if kind else "", phase)))


def _module(types: Mapping[str, str], scope: Scope, phase: str, selection: Selection) -> Place | None:
    path = _selected_path(scope.module, selection.module) if selection.module else scope.module
    if path is None:
        return None
    name = path or (scope.module_type if not scope.module else "") or OUTSIDE
    place = Place(name, phase)
    is_selected = matches(name, selection.op) or matches(unit_name(place, types), selection.op)
    return place if is_selected else None


def _selected_path(path: str, patterns: Sequence[str]) -> str | None:
    """The outermost of the modules around a call, itself included, that a pattern matches."""
    parts = path.split(".") if path else []
    if "" in patterns or (not parts and matches("", patterns)):
        # the root matches `*` too, but only calls of its own are meant
        return ""
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if matches(prefix, patterns)), None)


def _function(scope: Scope, phase: str, selection: Selection) -> Place | None:
    if not matches(scope.module, selection.module):
        return None
    for depth, (file, function) in enumerate(frames_of(scope)):
        name = f"{PurePath(file).stem}:{function}" if function else OUTSIDE
        if matches(name, selection.op):
            return Place(name, phase, file, scope.callers[depth:])
    return None
