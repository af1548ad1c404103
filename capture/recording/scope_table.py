"""Tables that number scopes, torch settings, and (signature, scope) pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from opgrip.capture.program.environment import describe_context, read_context
from opgrip.capture.program.places import Location, Places, SourceLine, SourceLines, innermost_module
from opgrip.capture.recording.pending_records import PendingRecords
from opgrip.traces.schema.records import Context, Record, Scope

PAIR = "pair"  # kind of the numbers that identify a pair of signature and scope
# smallest number of a (signature, scope) pair; it marks the beginning of a call in `ThreadMode.rows`, because it is
# larger than all other integers there
FIRST_PAIR = 1 << 61


class Generations:
    def __init__(self) -> None:
        self.current = 0
        self._next: defaultdict[Hashable, int] = defaultdict(int)
        self._firsts: dict[int, dict[Hashable, int]] = {0: {}}
        self._ends: dict[int, dict[Hashable, int]] = {}

    def next(self, kind: Hashable) -> int:
        number = self._next[kind]
        self._next[kind] = number + 1
        return number

    def count(self, kind: Hashable) -> int:
        return self._next[kind]

    def size(self, kind: Hashable) -> int:
        return self._next[kind] - self._firsts[self.current].get(kind, 0)

    def begin(self) -> None:
        self._ends[self.current] = dict(self._next)
        self.current += 1
        self._firsts[self.current] = dict(self._next)

    def numbers(self, kind: Hashable, generations: set[int]) -> Iterator[int]:
        for generation in sorted(generations & self._firsts.keys()):
            end = self._next[kind] if generation == self.current else self._ends[generation].get(kind, 0)
            yield from range(self._firsts[generation].get(kind, 0), end)

    def keep(self, generations: set[int]) -> None:
        for generation in [
            generation for generation in self._firsts if generation not in generations and generation != self.current
        ]:
            del self._firsts[generation], self._ends[generation]


Sites = tuple[SourceLine, ...]


class ScopeTable:
    """The numbered scopes of one recording, and the numbered pairs of a signature and a scope."""

    def __init__(
        self,
        places: Places,
        lines: SourceLines,
        generations: Generations,
        pending: PendingRecords,
        path_of: Callable[[nn.Module], str | None],
    ) -> None:
        self._path_of = path_of
        self.pairs: dict[int, tuple[int, int, int]] = {}
        self._places = places
        self._lines = lines
        self._generations = generations
        self._pending, self._lock = pending, pending.lock
        self._scopes: dict[Hashable, int] = {}
        self._records: dict[int, Scope] = {}
        self._contexts: dict[Hashable, int] = {}
        self._pair_numbers: dict[tuple[int, int, int], int] = {}

    def point(self, signature: int, place: Location, tensors: int) -> tuple[int, int]:
        scope = self.scope(self._refine_place(place), self._lines.here(), self._context(place.autocast))
        return scope, self.pair(signature, scope, tensors)

    def pair(self, signature: int, scope: int, tensors: int) -> int:
        key = (signature, scope, tensors)
        number = self._pair_numbers.get(key)
        if number is None:
            with self._lock:
                number = self._pair_numbers.get(key)
                if number is None:
                    number = FIRST_PAIR + self._generations.next(PAIR)
                    # store this first: other threads read the pair number without the lock
                    self.pairs[number] = key
                    self._pair_numbers[key] = number
        return number

    def scope(self, place: Location, sites: Sites, context: int) -> int:
        key = (place, sites, context)
        number = self._scopes.get(key)
        if number is None:
            site = sites[0] if sites else SourceLine("", "", 0)
            callers = tuple(f"{item.file}:{item.line} {item.function}" for item in sites[1:])
            where = (place.module, place.module_type, place.phase, place.inside)
            record = Scope(0, *where, site.function, site.file, site.line, callers, context)
            number = self._add(self._scopes, key, replace(record, gripped=place.gripped))
        return number

    def backward_scope(self, scope: int, forward: int) -> int:
        key = (scope, forward)
        number = self._scopes.get(key)
        if number is None:
            if forward not in self._records:
                return scope
            number = self._add(self._scopes, key, replace(self._records[scope], forward=forward))
        return number

    def adopt(self, scope: Scope, records: Mapping[tuple[type, int | None], Record]) -> int:
        """Return the number of the scope that equals a scope of another recording; add the scope if there is none."""
        context, forward = records.get((Context, scope.context)), records.get((Scope, scope.forward))
        context_number = forward_number = None
        if isinstance(context, Context):
            key = tuple(context.settings.items())
            context_number = self._add(self._contexts, key, replace(context, number=0))
        if isinstance(forward, Scope):
            forward_number = self.adopt(forward, records)
        record = replace(scope, number=0, context=context_number, forward=forward_number)
        return self._add(self._scopes, record, record)

    def forget(self) -> None:
        for table in (self._pair_numbers, self._scopes, self._contexts):
            table.clear()

    def prune_pairs(self, generations: set[int], pairs: set[int]) -> None:
        of_generations = (FIRST_PAIR + number for number in self._generations.numbers(PAIR, generations))
        self.pairs = {number: pair for number, pair in self.pairs.items() if number in pairs} | {
            number: self.pairs[number] for number in of_generations if number in self.pairs
        }

    def prune_scopes(self, scopes: set[int]) -> None:
        self._records = {number: self._records[number] for number in scopes if number in self._records}

    def _refine_place(self, place: Location) -> Location:
        module = innermost_module() if place.module_type else None
        path = None if module is None else self._path_of(module)
        if path is None or path == place.module:
            return place
        return self._places.module(place, path, type(module).__name__)

    def _context(self, autocast: str) -> int:
        values = read_context()
        key = (values, autocast)
        number = self._contexts.get(key)
        if number is None:
            number = self._add(self._contexts, key, Context(0, describe_context(values) | {"autocast": autocast}))
        return number

    def _add(self, table: dict[Hashable, int], key: Hashable, record: Scope | Context) -> int:
        with self._lock:
            number = table.get(key)
            if number is None:
                number = self._generations.next(Scope if isinstance(record, Scope) else Context)
                record = replace(record, number=number)
                if isinstance(record, Scope):
                    self._records[number] = record
                self._pending.add(record)
                # last: a number that can be looked up is then always written, even if this is interrupted
                table[key] = number
        return number
