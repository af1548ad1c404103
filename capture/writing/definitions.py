"""Records to which calls refer, which are written only to files that need them; and the limits of a recording."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.recording.thread_mode import ThreadCalls
from opgrip.traces.analysis.redaction import Policy, Redaction
from opgrip.traces.io.writer import encode_line
from opgrip.traces.schema.arguments import numbers_of
from opgrip.traces.schema.records import (
    EXTENSION,
    Calls,
    Context,
    Entered,
    Graph,
    Observed,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)

CALL_BYTES = 48  # estimated size of a call in a block; too high, so that blocks shrink before a limit
SIGNATURE_BYTES = 8_000  # memory per signature, with value models and predictions; measured on linear layers
INTEGER_BYTES = 40  # memory in bytes of an integer that a dispatch mode has collected

Pending = tuple[Record, bytes]  # a record and its encoded line


@dataclass(frozen=True, slots=True)
class _Line:
    place: int
    content: bytes | Record
    references: tuple[Hashable, ...]
    is_signature: bool
    is_thread: bool


@dataclass(slots=True)
class _File:
    redaction: Redaction | None
    written: dict[Hashable, int] = field(default_factory=dict)
    late: set[Hashable] = field(default_factory=set)
    signatures: int = 0


class Definitions:
    """Records that other records refer to, by name (see `name_of`), and which of them are already in the file."""

    def __init__(self, privacy: Policy | None = None, keeps_written: bool = True) -> None:
        self._privacy, self._keeps_written = privacy, keeps_written
        self._lines: dict[Hashable, list[_Line]] = {}
        self._count = 0
        self.begin_file()

    def begin_file(self) -> None:
        self.file = _File(self.make_redaction())

    def make_redaction(self) -> Redaction | None:
        return None if self._privacy is None else Redaction(self._privacy)

    def add(self, pending: Iterable[Pending]) -> None:
        for record, text in pending:
            name = name_of(record)
            content = text if self._privacy is None else record
            kinds = isinstance(record, Signature), isinstance(record, Thread)
            line = _Line(self._count, content, tuple(references_of(record)), *kinds)
            if isinstance(record, Thread):
                # each file numbers its threads separately
                self._lines.pop(name, None)
            self._lines.setdefault(name, []).append(line)
            self._count += 1
            if name in self.file.written:
                self.file.late.add(name)

    def lines_for(self, records: Iterable[Record]) -> bytes:
        """Return the encoded definitions that these records need and that the file lacks."""
        return self._take(name for record in records for name in references_of(record))

    def other_lines(self) -> bytes:
        return self._take(list(self._lines))

    def all_lines(self, redaction: Redaction | None) -> bytes:
        return self._join((line for lines in self._lines.values() for line in lines if not line.is_thread), redaction)

    def size(self, names: Iterable[Hashable], besides: set[Hashable]) -> int:
        """Return the size in bytes of the encoded records with these names that the file lacks.

        besides : names of records not to count; the names of the counted records are added to it
        """
        new = set(self._closure(names, lambda name: name not in self.file.written and name not in besides))
        besides |= new
        lines = (line.content for name in new for line in self._lines.get(name, ()))
        return sum(len(content) for content in lines if isinstance(content, bytes))

    def encode(self, records: Iterable[Record], redaction: Redaction | None) -> bytes:
        if redaction is not None:
            records = [item for record in records for item in redaction.records(record)]
        return b"".join(map(encode_line, records))

    def prune(self, names: Iterable[Hashable]) -> None:
        needed = set(self._closure(names, lambda name: True))
        self._lines = {name: lines for name, lines in self._lines.items() if name in needed}

    def _take(self, names: Iterable[Hashable]) -> bytes:
        lines: list[_Line] = []
        file = self.file
        needed = {*names, *file.late}
        for name in list(self._closure(needed, lambda name: name in file.late or name not in file.written)):
            own = self._lines.get(name, [])
            lines += own[file.written.get(name, 0) :]
            file.written[name] = len(own)
            if not self._keeps_written:
                self._lines.pop(name, None)
                file.written[name] = 0
        file.late.clear()
        file.signatures += sum(line.is_signature for line in lines)
        return self._join(lines, file.redaction)

    def _join(self, lines: Iterable[_Line], redaction: Redaction | None) -> bytes:
        contents = [line.content for line in sorted(lines, key=lambda line: line.place)]
        return b"".join(item if isinstance(item, bytes) else self.encode([item], redaction) for item in contents)

    def _closure(self, names: Iterable[Hashable], is_asked: Callable[[Hashable], bool]) -> Iterator[Hashable]:
        waiting, visited = list(names), set[Hashable]()
        while waiting:
            name = waiting.pop()
            if name not in visited and is_asked(name):
                visited.add(name)
                yield name
                waiting.extend(reference for line in self._lines.get(name, ()) for reference in line.references)


def name_of(record: Record) -> Hashable:
    """Return the type and number by which other records refer to a record."""
    if isinstance(record, Observed | Graph):
        return type(record), record.signature
    return type(record), getattr(record, "number", None)


def references_of(record: Record) -> Iterator[Hashable]:
    match record:
        case Signature():
            yield from ((Values, number) for number in numbers_of((record.args, record.kwargs)) if number is not None)
            # observations of its later calls belong to the signature
            yield Observed, record.number
            if record.kind == EXTENSION:
                yield Graph, record.number
        case Observed():
            yield from ((Values, number) for number in record.values if number is not None)
        case Graph():
            yield from ((Signature, number) for number in record.calls)
            yield from ((Scope, number) for number in record.scope)
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


@dataclass(frozen=True, slots=True)
class RecordingLimits:
    """Limits at which a recording ends while the program continues; None for no limit.

    bytes : size of the trace before compression, including full values
    memory : approximate number of bytes that the capture keeps in memory
    """

    calls: int | None = None
    bytes: int | None = None
    memory: int | None = None

    def is_over_memory(self, recorder: Recorder) -> bool:
        if self.memory is None:
            return False
        return len(recorder.signatures) * SIGNATURE_BYTES + recorder.threads.waiting * INTEGER_BYTES > self.memory

    def __bool__(self) -> bool:
        return self.calls is not None or self.bytes is not None or self.memory is not None


def parts_within(
    block: ThreadCalls, pairs: Mapping[int, tuple[int, int, int]], held: Definitions, room: int
) -> tuple[ThreadCalls, ThreadCalls]:
    names: set[Hashable] = set()
    count = size = 0
    for pair in block.calls[:, 0].tolist():
        signature, scope, _ = pairs[pair]
        size += CALL_BYTES + held.size([(Signature, signature), (Scope, scope)], names)
        if count and size > room:
            break
        count += 1
    return block.part(0, count), block.part(count, len(block))
