"""Ends a recording at a limit, with no more in the file than the calls before it need."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.writing.blocks import CallBlock
from opgrip.traces.schema.arguments import numbers_of
from opgrip.traces.schema.records import Calls, Context, Entered, Observed, Record, Scope, Signature, Thread, Values

CALL_BYTES = 48
"""A call in a block, guessed too large, so that the last calls before a limit come in ever smaller blocks."""
SIGNATURE_BYTES = 8_000
"""What a capture's process grows by for a signature, with its value models and what foresees its calls: measured on
linear layers whose batches all have other sizes."""
INTEGER_BYTES = 40
"""One of a row that waits to be written."""

Pending = tuple[Record, bytes]
"""A record, and the line that it is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a recording ends although the program goes on: after so many calls, or bytes before compression.

    Whole values count to the bytes.

    Attributes
    ----------
    memory : bytes that what it keeps of the program may take, estimated from how much that is
    """

    calls: int | None = None
    bytes: int | None = None
    memory: int | None = None

    def is_over_memory(self, recorder: Recorder) -> bool:
        """Whether a recorder keeps more than that."""
        if self.memory is None:
            return False
        return len(recorder.signatures) * SIGNATURE_BYTES + recorder.threads.waiting * INTEGER_BYTES > self.memory

    def __bool__(self) -> bool:
        return self.calls is not None or self.bytes is not None or self.memory is not None


class Held:
    """Records that no call in the file refers to yet.

    Attributes
    ----------
    signatures : how many signatures were let go
    """

    def __init__(self) -> None:
        self.signatures = 0
        self._held: dict[Hashable, list[tuple[int, Pending]]] = defaultdict(list)
        self._needed: set[Hashable] = set()
        self._count = 0

    def add(self, pending: Iterable[Pending]) -> None:
        """Hold records back."""
        for item in pending:
            self._held[name_of(item[0])].append((self._count, item))
            self._count += 1

    def release(self, records: Iterable[Record]) -> bytes:
        """The lines of those that records refer to, and of those that came too late for earlier ones."""
        own = {name for record in records for name in references_of(record)}
        # what came too late refers to others, as a later look at a signature does to the values that it met
        self._needed |= self._closure(own | (self._held.keys() & self._needed))
        return self._let_go([name for name in self._held if name in self._needed])

    def release_all(self) -> bytes:
        """The lines of the others."""
        return self._let_go(list(self._held))

    def size(self, names: Iterable[Hashable], besides: set[Hashable]) -> int:
        """Bytes of what things need that is not needed yet; `besides` has what others need, and gets theirs too."""
        new = self._closure(names) - self._needed - besides
        besides |= new
        return sum(len(line) for name in new for _, (_, line) in self._held.get(name, ()))

    def _closure(self, names: Iterable[Hashable]) -> set[Hashable]:
        """Names, and those of all that their records refer to."""
        waiting, closure = list(names), set()
        while waiting:
            name = waiting.pop()
            if name not in closure:
                closure.add(name)
                for _, (record, _) in self._held.get(name, ()):
                    waiting.extend(references_of(record))
        return closure

    def _let_go(self, names: Iterable[Hashable]) -> bytes:
        released = sorted(item for name in names for item in self._held.pop(name))
        self.signatures += sum(isinstance(record, Signature) for _, (record, _) in released)
        return b"".join(line for _, (_, line) in released)


def parts_within(
    block: CallBlock, pairs: Mapping[int, tuple[int, int, int]], held: Held, room: int
) -> tuple[CallBlock, CallBlock]:
    """A block's first calls, which likely fit in so many bytes, one at least, and the others.

    Parameters
    ----------
    pairs : `ScopeTable.pairs`
    """
    names: set[Hashable] = set()
    count = size = 0
    for pair in block.calls[:, 0].tolist():
        signature, scope, _ = pairs[pair]
        size += CALL_BYTES + held.size([(Signature, signature), (Scope, scope)], names)
        if count and size > room:
            break
        count += 1
    return block.part(0, count), block.part(count, len(block))


def name_of(record: Record) -> Hashable:
    """What other records refer to a record by."""
    if isinstance(record, Observed):
        return Observed, record.signature
    return type(record), getattr(record, "number", None)


def references_of(record: Record) -> Iterator[Hashable]:
    """The names of what a record refers to."""
    match record:
        case Signature():
            yield from ((Values, number) for number in numbers_of((record.args, record.kwargs)) if number is not None)
            # what later calls of it met belongs to it
            yield Observed, record.number
        case Observed():
            yield from ((Values, number) for number in record.values if number is not None)
        case Scope():
            yield Context, record.context
            if record.forward is not None:
                yield Scope, record.forward
        case Calls():
            yield from ((Signature, number) for number in record.signature)
            yield from ((Scope, number) for number in record.scope)
            yield Thread, record.thread
        case Entered():
            yield Thread, record.thread
            yield from ((Signature, record.signature), (Scope, record.scope))
            if record.opened is not None:
                yield from references_of(record.opened)
