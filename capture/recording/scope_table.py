"""Numbers of scopes, of the settings there, and of signatures in scopes, which go on when tables begin again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

from torch import nn

from opgrip.capture.program.environment import describe_context, read_context
from opgrip.capture.program.places import Location, Places, SourceLine, SourceLines, innermost_module
from opgrip.capture.recording.pending_records import PendingRecords
from opgrip.traces.schema.records import Context, Scope

PAIR = "pair"
"""The kind of number that stands for a signature in a scope."""


class Epochs:
    """Which numbers were given in which epoch: an epoch lasts from one beginning of the tables to the next.

    Attributes
    ----------
    current : the number of this one
    """

    def __init__(self) -> None:
        self.current = 0
        self._next: defaultdict[Hashable, int] = defaultdict(int)
        self._firsts: dict[int, dict[Hashable, int]] = {0: {}}
        self._ends: dict[int, dict[Hashable, int]] = {}

    def next(self, kind: Hashable) -> int:
        """A new number, to be asked for under the lock of the tables."""
        number = self._next[kind]
        self._next[kind] = number + 1
        return number

    def count(self, kind: Hashable) -> int:
        """How many numbers there were in all."""
        return self._next[kind]

    def size(self, kind: Hashable) -> int:
        """How many of them this epoch gave."""
        return self._next[kind] - self._firsts[self.current].get(kind, 0)

    def begin(self) -> None:
        """Begin another epoch."""
        self._ends[self.current] = dict(self._next)
        self.current += 1
        self._firsts[self.current] = dict(self._next)

    def numbers(self, kind: Hashable, epochs: set[int]) -> Iterator[int]:
        """The numbers that these epochs gave, as far as they are kept."""
        for epoch in sorted(epochs & self._firsts.keys()):
            end = self._next[kind] if epoch == self.current else self._ends[epoch].get(kind, 0)
            yield from range(self._firsts[epoch].get(kind, 0), end)

    def keep(self, epochs: set[int]) -> None:
        """Forget the others."""
        for epoch in [epoch for epoch in self._firsts if epoch not in epochs and epoch != self.current]:
            del self._firsts[epoch], self._ends[epoch]


Sites = tuple[SourceLine, ...]


class ScopeTable:
    """The scopes of one capture's calls.

    Parameters
    ----------
    places : of the threads
    lines : finds the source lines that a call is made from
    epochs : give the numbers
    pending : takes the records, under its lock
    path_of : returns the path of a module

    Attributes
    ----------
    refines : a method of a module that was not called itself is in that module's scope
    pairs : signature, scope and number of tensors that a pair's number stands for
    """

    def __init__(
        self,
        places: Places,
        lines: SourceLines,
        epochs: Epochs,
        pending: PendingRecords,
        path_of: Callable[[nn.Module], str | None],
    ) -> None:
        self.refines = True
        self._path_of = path_of
        self.pairs: dict[int, tuple[int, int, int]] = {}
        self._places = places
        self._lines = lines
        self._epochs = epochs
        self._pending, self._lock = pending, pending.lock
        self._scopes: dict[Hashable, int] = {}
        self._records: dict[int, Scope] = {}
        self._contexts: dict[Hashable, int] = {}
        self._pair_numbers: dict[tuple[int, int, int], int] = {}

    def point(self, signature: int, place: Location, tensors: int) -> tuple[int, int]:
        """Scope and pair of calls that are made from where this thread is."""
        scope = self.scope(self._refine_place(place), self._lines.here(), self._context(place.autocast))
        return scope, self.pair(signature, scope, tensors)

    def pair(self, signature: int, scope: int, tensors: int) -> int:
        """The number of a signature in a scope, for calls that take and give so many tensors."""
        key = (signature, scope, tensors)
        number = self._pair_numbers.get(key)
        if number is None:
            with self._lock:
                number = self._pair_numbers.get(key)
                if number is None:
                    number = self._epochs.next(PAIR)
                    # first: other threads take the number without the lock
                    self.pairs[number] = key
                    self._pair_numbers[key] = number
        return number

    def scope(self, place: Location, sites: Sites, context: int) -> int:
        """The number of a scope."""
        key = (place, sites, context)
        number = self._scopes.get(key)
        if number is None:
            with self._lock:
                number = self._scopes.get(key)
                if number is not None:
                    return number
                site = sites[0] if sites else SourceLine("", "", 0)
                callers = tuple(f"{item.file}:{item.line} {item.function}" for item in sites[1:])
                where = (place.module, place.module_type, place.phase, place.inside)
                number = self._epochs.next(Scope)
                record = Scope(number, *where, site.function, site.file, site.line, callers, context)
                record = replace(record, gripped=place.gripped)
                self._records[number] = record
                self._pending.add(record)
                # last, here and below: a number that is found is written, whatever interrupts this
                self._scopes[key] = number
        return number

    def has_scope(self, number: int) -> bool:
        """Whether a scope was not forgotten."""
        return number in self._records

    def backward_scope(self, scope: int, forward: int) -> int:
        """The number of a backward call's scope with that of the forward call that caused it."""
        key = (scope, forward)
        number = self._scopes.get(key)
        if number is None:
            with self._lock:
                number = self._scopes.get(key)
                if number is not None:
                    return number
                number = self._epochs.next(Scope)
                record = replace(self._records[scope], number=number, forward=forward)
                self._records[number] = record
                self._pending.add(record)
                self._scopes[key] = number
        return number

    def forget(self) -> None:
        """Begin anew, under the lock; what calls refer to by number stays until `prune`."""
        for table in (self._pair_numbers, self._scopes, self._contexts):
            table.clear()

    def prune_pairs(self, epochs: set[int], pairs: set[int]) -> None:
        """Forget all pairs but these, and those of these epochs."""
        self.pairs = {number: pair for number, pair in self.pairs.items() if number in pairs} | {
            number: self.pairs[number] for number in self._epochs.numbers(PAIR, epochs) if number in self.pairs
        }

    def prune_scopes(self, scopes: set[int]) -> None:
        """Forget all scopes but these."""
        self._records = {number: self._records[number] for number in scopes if number in self._records}

    def _refine_place(self, place: Location) -> Location:
        """The place, in the module whose method runs where that is not the one that was called."""
        module = innermost_module() if place.module_type and self.refines else None
        path = None if module is None else self._path_of(module)
        if path is None or path == place.module:
            return place
        return self._places.module(place, path, type(module).__name__)

    def _context(self, autocast: str) -> int:
        values = read_context()
        number = self._contexts.get((values, autocast))
        if number is None:
            with self._lock:
                number = self._contexts.get((values, autocast))
                if number is not None:
                    return number
                number = self._epochs.next(Context)
                self._pending.add(Context(number, describe_context(values) | {"autocast": autocast}))
                self._contexts[values, autocast] = number
        return number
