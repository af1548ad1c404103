"""The bytes that one kernel in place of a function's operators would still have to read and write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from opgrip.traces.longtail.calls import Function, MadeCall, function_of
from opgrip.traces.records import NO_STORAGE


@dataclass(slots=True)
class _Memory:
    """Memory that a call gave: whose, whether another function takes it, and whether anything reads it."""

    maker: Function
    is_used_elsewhere: bool = False
    read: bool = False


@dataclass(slots=True)
class Traffic:
    """Where memory comes from and goes to in a whole trace."""

    _memory_of_storage: dict[int, _Memory] = field(default_factory=dict)

    def note(self, calls: Iterable[MadeCall]) -> None:
        """Take note of a trace's calls, in the order in which they started."""
        for call in calls:
            function = function_of(call)
            argument_storages = set(call.takes)
            for storage, writes in zip(call.takes, call.operation.writes, strict=False):
                memory = self._memory_of_storage.get(storage)
                if memory is not None:
                    memory.is_used_elsewhere |= memory.maker != function
                    memory.read |= call.operation.moves and not writes
            for storage in call.gives:
                if storage != NO_STORAGE and storage not in argument_storages:
                    self._memory_of_storage.setdefault(storage, _Memory(function))

    def bytes_of(self, run: Sequence[MadeCall]) -> int:
        """Bytes that come into and leave a run of one function's calls.

        What the function itself made, in whichever phase, can stay in a kernel. What others made is read once; what
        others take later, or nothing that was recorded reads, is written once; so is what was there before.
        """
        if all(storage == NO_STORAGE for call in run for storage in (*call.takes, *call.gives)):
            return _ends(run)
        borders = _Borders()
        for call in run:
            if call.operation.moves:
                self._cross(call, borders)
        return borders.bytes

    def _cross(self, call: MadeCall, borders: _Borders) -> None:
        function, operation = function_of(call), call.operation
        for place, storage in enumerate(call.takes):
            memory = self._memory_of_storage.get(storage)
            if storage == NO_STORAGE or (memory is not None and memory.maker == function):
                continue
            if operation.writes[place]:
                borders.write(storage, operation.argument_bytes[place])
            else:
                borders.read(
                    storage, operation.shapes[place], operation.argument_bytes[place], operation.extents[place]
                )
        for storage, size in zip(call.gives, operation.result_bytes, strict=False):
            memory = self._memory_of_storage.get(storage)
            if memory is not None and memory.maker == function and (memory.is_used_elsewhere or not memory.read):
                borders.write(storage, size)


@dataclass(slots=True)
class _Borders:
    """What crosses the border of a run: by memory, bytes of each tensor read, how far these reach, bytes written."""

    reads: dict[int, dict[tuple[object, ...], int]] = field(default_factory=dict)
    extents: dict[int, int] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)

    def read(self, storage: int, shape: tuple[object, ...], size: int, extent: int) -> None:
        self.reads.setdefault(storage, {})[shape] = size
        self.extents[storage] = max(self.extents.get(storage, 0), extent)

    def write(self, storage: int, size: int) -> None:
        self.writes[storage] = max(self.writes.get(storage, 0), size)

    @property
    def bytes(self) -> int:
        """Of all; two views of the same memory may overlap."""
        inwards = sum(min(sum(sizes.values()), self.extents[storage]) for storage, sizes in self.reads.items())
        return inwards + sum(self.writes.values())


def _ends(run: Sequence[MadeCall]) -> int:
    """Bytes that the first call takes and the last gives: all that is sure where the trace has no dataflow."""
    moving = [call.operation for call in run if call.operation.moves]
    return sum(moving[0].argument_bytes) + sum(moving[-1].result_bytes) if moving else 0
