"""Which calls of a trace belong to the part of it that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opgrip.cli.suggestions import nearest
from opgrip.errors import UserError
from opgrip.traces.analysis.trimming.outline import Outline
from opgrip.traces.schema.records import OPERATOR
from opgrip.traces.table.step_starts import step_starts

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Part:
    """What calls must have, all of it, to belong to a part.

    Attributes
    ----------
    steps : the first and the one behind the last, counted from 0; None for the end
    phases : `forward`, `backward`, `optimizer`
    modules, ops : patterns as shells match file names, of which one must match
    time_ns : from when, and until before when, a call begins, since the start of the capture; None for the end
    """

    steps: tuple[int, int | None] | None = None
    phases: Sequence[str] = ()
    modules: Sequence[str] = ()
    ops: Sequence[str] = ()
    time_ns: tuple[int, int | None] | None = None

    def as_json(self) -> dict[str, Any]:
        """What the header of a trimmed trace says of it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: list(value) for name, value in values.items() if value}


def selected_calls(outline: Outline, part: Part) -> Flags:
    """Of each call, whether it belongs to a part: it has what is asked for, or ran inside of a function that has.

    Raises
    ------
    UserError : where no call does, and for steps of a trace that does not tell them
    """
    flags = np.ones(len(outline.start_ns), dtype=np.bool_)
    if part.ops:
        flags &= _matching(outline, part.ops, "op", lambda index: outline.op_of(index), outline.signature)
    if part.modules:
        flags &= _matching(outline, part.modules, "module", lambda index: outline.module_of(index), outline.scope)
    if part.phases:
        flags &= _matching(outline, part.phases, "phase", lambda index: outline.phase_of(index), outline.scope)
    if part.time_ns is not None:
        flags &= within(outline.start_ns, part.time_ns)
    if part.steps is not None:
        flags &= _of_steps(outline, part.steps)
    if not flags.any():
        raise UserError("no call has all that is asked for", "see opgrip trace info")
    return with_inner_calls(outline, flags)


def with_inner_calls(outline: Outline, flags: Flags) -> Flags:
    """The same calls, and those that the functions among them made."""
    around = flags & np.isin(outline.signature, [n for n, item in outline.signatures.items() if item.kind != OPERATOR])
    if not around.any():
        return flags
    flags = flags.copy()
    for thread in np.unique(outline.thread[around]):
        begin: int | None = None
        # calls stand in the order in which they ended: what is inside of one stands before it
        for index in np.nonzero(outline.thread == thread)[0][::-1].tolist():
            start = int(outline.start_ns[index])
            if begin is not None and start >= begin:
                flags[index] = True
            else:
                begin = start if around[index] else None
    return flags


def within(starts: NDArray[np.int64], span: tuple[int, int | None]) -> Flags:
    """Of each call, whether it begins in a span."""
    first, end = span
    return (starts >= first) & (True if end is None else starts < end)


def _matching(
    outline: Outline, patterns: Sequence[str], what: str, name_of: Callable[[int], str], numbers: NDArray[np.int64]
) -> Flags:
    names = {int(number): name_of(int(number)) for number in np.unique(numbers)}
    matches = [number for number, name in names.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not matches:
        near = ", ".join(map(repr, nearest(patterns[0], sorted(set(names.values()) - {""}))))
        hint = f"the trace has {near}" if near else f"the trace names no {what}"
        raise UserError(f"no {what} matches --{what} {' '.join(patterns)}", hint)
    return np.isin(numbers, matches)


def _of_steps(outline: Outline, steps: tuple[int, int | None]) -> Flags:
    """Return which calls belong to some steps, which begin when the trace says, or at a place that each has once."""
    begins = outline.step_starts_ns.tolist()
    count = outline.header.get("steps", len(begins))
    if type(count) is not int or not 0 < count <= len(outline.start_ns):
        raise UserError("the trace does not say how many steps it has", "name a span of --time")
    first, end = steps
    if first >= count:
        raise UserError(f"there is no step {first}", f"the trace has the steps 0 to {count - 1}")
    if "steps" in outline.header:
        begins = _beginnings(outline, count)
    until = None if end is None or end >= count else begins[end]
    return within(outline.start_ns, (begins[first] if first else int(outline.start_ns.min()), until))


def _beginnings(outline: Outline, count: int) -> list[int]:
    """When each of so many steps began."""
    begins = step_starts(lambda: [(None, outline.scope, outline.signature, outline.start_ns)], {None: count}).begins
    if None not in begins:
        raise UserError("its steps cannot be told apart: no call was made once in each", "name a span of --time")
    starts_ns: list[int] = begins[None].tolist()
    return starts_ns
