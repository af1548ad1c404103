"""The calls of a trace in the runs of the units that they belong to, each with what flows between its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from opgrip.replay.sequences.flow import Interface
from opgrip.replay.units.places import Place
from opgrip.traces import Trace
from opgrip.traces.arguments import TensorSpec
from opgrip.traces.records import NO_STORAGE

DETACH = "aten.detach.default"


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One call of a unit.

    Attributes
    ----------
    takes, gives : memory of each tensor among its arguments and results, counted within the unit in the order in which
        its calls mention it; `NO_STORAGE` where it is not known
    """

    signature: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Calls that a thread made one after the other in one unit.

    Attributes
    ----------
    wanted : results that calls outside take later, each as the place of its call and its place among that call's
    contexts : numbers of the settings that the calls ran under
    """

    place: Place
    calls: tuple[UnitCall, ...]
    duration_ns: int
    wanted: frozenset[tuple[int, int]]
    contexts: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """A call of the trace: `number` in its table, memory as it has it."""

    number: int
    place: Place | None
    signature: int
    duration_ns: int
    context: int | None
    takes: tuple[int, ...]
    gives: tuple[int, ...]


def make_runs(trace: Trace, places: Mapping[int, Place], interfaces: Mapping[int, Interface]) -> list[Run]:
    """The runs of all units, in the order in which each thread made them."""
    threads: dict[tuple[Any, Any], list[_Row]] = {}
    for thread, row in _rows(trace, places, interfaces):
        threads.setdefault(thread, []).append(row)
    uses = _Uses(interfaces, {item.number for item in trace.signatures if item.op == DETACH})
    for rows in threads.values():
        for row in rows:
            uses.note(row)
    return [_run(rows, place, uses) for thread in threads.values() for place, rows in _together(thread)]


def geometry(spec: TensorSpec) -> tuple[object, ...]:
    """What two tensors in the same memory have in common that are the same."""
    return (spec.shape, spec.stride, spec.offset, spec.dtype, spec.layout, spec.conj, spec.neg)


def _rows(
    trace: Trace, places: Mapping[int, Place], interfaces: Mapping[int, Interface]
) -> Iterator[tuple[tuple[Any, Any], _Row]]:
    context_of = {scope.number: scope.context for scope in trace.scopes}
    own = trace.calls[trace.calls["inside"].isna()]
    columns = ("process", "thread", "signature", "scope", "duration_ns", "tensors", "first_storage")
    nothing = Interface((), ())
    memory = trace.storages.tolist()
    for number, *values in zip(own.index.tolist(), *(own[name].tolist() for name in columns), strict=True):
        process, thread, signature, scope, duration, count, first = values
        takes, gives = interfaces.get(signature, nothing).memory_of(tuple(memory[first : first + count]))
        place = places.get(scope) if signature in interfaces else None
        # no process is nan, which equals no other
        whose = (process if process == process else None, thread)
        yield whose, _Row(number, place, signature, duration, context_of.get(scope), takes, gives)


def _together(rows: list[_Row]) -> Iterator[tuple[Place, list[_Row]]]:
    """Calls of one thread, in runs."""
    place: Place | None = None
    run: list[_Row] = []
    for row in rows:
        if place is not None and row.place is not None and place.goes_on(row.place):
            run.append(row)
            place = max(place, row.place, key=lambda item: len(item.around))
            continue
        if place is not None:
            yield place, run
        place, run = row.place, [row]
    if place is not None:
        yield place, run


class _Uses:
    """Where in the trace each tensor is taken last."""

    def __init__(self, interfaces: Mapping[int, Interface], detaching: set[int]) -> None:
        self._detaching = detaching
        known: dict[tuple[object, ...], int] = {}
        number = lambda spec: known.setdefault(geometry(spec), len(known))  # noqa: E731
        self._taken = {item: [number(spec) for spec in found.takes] for item, found in interfaces.items()}
        self._given = {item: [number(spec) for spec in found.gives] for item, found in interfaces.items()}
        self._tensors: dict[tuple[int, int], int] = {}
        self._memory: dict[int, int] = {}

    def note(self, row: _Row) -> None:
        for memory, shape in zip(row.takes, self._taken.get(row.signature, ()), strict=False):
            self._tensors[memory, shape] = max(row.number, self._tensors.get((memory, shape), -1))
            self._memory[memory] = max(row.number, self._memory.get(memory, -1))

    def after(self, rows: list[_Row]) -> frozenset[tuple[int, int]]:
        """Which results of some calls others take after them: call and place of the last that gives each tensor.

        Where later calls take memory that was made here as tensors that no call here gave, the last one in it.
        """
        end = rows[-1].number
        wanted: dict[tuple[int, int], tuple[int, int]] = {}
        last_in: dict[int, tuple[int, int]] = {}
        outside: set[int] = set()
        for index, row in enumerate(rows):
            outside.update(memory for memory in row.takes if memory not in last_in)
            for place, (memory, shape) in enumerate(zip(row.gives, self._given[row.signature], strict=False)):
                if memory == NO_STORAGE or self._memory.get(memory, -1) <= end:
                    continue
                if memory not in outside:
                    last_in[memory] = (index, place)
                again = row.signature in self._detaching and (memory, shape) in wanted
                if self._tensors.get((memory, shape), -1) > end and not again:
                    wanted[memory, shape] = (index, place)
        found = {memory for memory, _ in wanted}
        return frozenset([*wanted.values(), *(last for memory, last in last_in.items() if memory not in found)])


def _run(rows: list[_Row], place: Place, uses: _Uses) -> Run:
    numbers = {NO_STORAGE: NO_STORAGE}

    def counted(memory: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([numbers.setdefault(item, len(numbers) - 1) for item in memory])

    calls = tuple([UnitCall(row.signature, counted(row.takes), counted(row.gives)) for row in rows])
    duration = sum(row.duration_ns for row in rows)
    return Run(place, calls, duration, uses.after(rows), tuple(row.context for row in rows))
