"""Records that calls refer to, written to a file only if a call in it needs them, and limits of a recording."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from opgrip.capture.recording.recorder import Recorder
from opgrip.capture.torch_compat.torch_private import without_functions, without_modes
from opgrip.capture.writing.blocks import ThreadCalls
from opgrip.traces.analysis.redaction import Policy, Redaction
from opgrip.traces.io.writer import encode_line
from opgrip.traces.schema.arguments import numbers_of
from opgrip.traces.schema.records import Calls, Context, Entered, Observed, Record, Scope, Signature, Thread, Values

CALL_BYTES = 48
"""Bytes of a call in a block, estimated too high, so that the last calls before a limit come in ever smaller blocks."""
SIGNATURE_BYTES = 8_000
"""Bytes that a capture's process grows by for a signature, with its value models and what predicts its calls: measured
on linear layers whose batches all have other sizes."""
INTEGER_BYTES = 40
"""Bytes of an integer in a row that waits to be written."""

Pending = tuple[Record, bytes]
"""A record and its line."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A record as it stands in a file if it is not redacted first, its place among all, and what it refers to."""

    place: int
    content: bytes | Record
    references: tuple[Hashable, ...]
    is_signature: bool
    is_thread: bool


@dataclass(slots=True)
class _File:
    """What one file has.

    Attributes
    ----------
    redaction : of this file, whose value models it numbers; None if nothing is redacted
    written : how many lines of a name it has
    late : names that got others since
    signatures : how many it has
    """

    redaction: Redaction | None
    written: dict[Hashable, int] = field(default_factory=dict)
    late: set[Hashable] = field(default_factory=set)
    signatures: int = 0


class Definitions:
    """Records by the names that others refer to them by, for one file or for several, one after another.

    Redacted, they are so when they go to a file, each file by a redaction of its own: value models have other numbers
    then, which what was forgotten of one file would upset in the next.

    Parameters
    ----------
    privacy : how records are redacted; None to write the lines that come with them
    keeps_written : keep records for further files

    Attributes
    ----------
    file : what the file that is being written has
    """

    def __init__(self, privacy: Policy | None = None, keeps_written: bool = True) -> None:
        self._privacy, self._keeps_written = privacy, keeps_written
        self._lines: dict[Hashable, list[_Line]] = {}
        self._count = 0
        self.begin_file()

    def begin_file(self) -> None:
        """Begin a file that has nothing yet."""
        self.file = _File(self.make_redaction())

    def make_redaction(self) -> Redaction | None:
        """Return a redaction for another file, which numbers value models in its own way; None if there is none."""
        return None if self._privacy is None else Redaction(self._privacy)

    def add(self, pending: Iterable[Pending]) -> None:
        """Hold records."""
        for record, text in pending:
            name = name_of(record)
            content = text if self._privacy is None else record
            kinds = isinstance(record, Signature), isinstance(record, Thread)
            line = _Line(self._count, content, tuple(references_of(record)), *kinds)
            if isinstance(record, Thread):
                # each file numbers threads in its own way
                self._lines.pop(name, None)
            self._lines.setdefault(name, []).append(line)
            self._count += 1
            if name in self.file.written:
                self.file.late.add(name)

    def lines_for(self, records: Iterable[Record]) -> bytes:
        """Return the lines that the file lacks of what records refer to, and late ones of others in it."""
        return self._take(name for record in records for name in references_of(record))

    def other_lines(self) -> bytes:
        """Return all lines that the file lacks."""
        return self._take(list(self._lines))

    def all_lines(self, redaction: Redaction | None) -> bytes:
        """Return the lines of all records that are held, for a file with a redaction of its own."""
        return self._join((line for lines in self._lines.values() for line in lines if not line.is_thread), redaction)

    def size(self, names: Iterable[Hashable], besides: set[Hashable]) -> int:
        """Return the bytes of what names need that is neither in the file nor in `besides`, which then has it too."""
        new = set(self._closure(names, lambda name: name not in self.file.written and name not in besides))
        besides |= new
        lines = (line.content for name in new for line in self._lines.get(name, ()))
        return sum(len(content) for content in lines if isinstance(content, bytes))

    def encode(self, records: Iterable[Record], redaction: Redaction | None) -> bytes:
        """Return the lines of records, redacted if the file has a redaction."""
        if redaction is not None:
            # values are redacted by operators, which are not calls of the program
            with without_modes(), without_functions():
                records = [item for record in records for item in redaction.records(record)]
        return b"".join(map(encode_line, records))

    def prune(self, names: Iterable[Hashable]) -> None:
        """Forget all but the records of some names, and what these refer to."""
        kept = set(self._closure(names, lambda name: True))
        self._lines = {name: lines for name, lines in self._lines.items() if name in kept}

    def _take(self, names: Iterable[Hashable]) -> bytes:
        lines: list[_Line] = []
        file = self.file
        asked = {*names, *file.late}
        for name in list(self._closure(asked, lambda name: name in file.late or name not in file.written)):
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
        """Yield names, and those of all that their records refer to, as far as they are asked for."""
        waiting, visited = list(names), set[Hashable]()
        while waiting:
            name = waiting.pop()
            if name not in visited and is_asked(name):
                visited.add(name)
                yield name
                waiting.extend(reference for line in self._lines.get(name, ()) for reference in line.references)


def name_of(record: Record) -> Hashable:
    """Return what other records refer to a record by."""
    if isinstance(record, Observed):
        return Observed, record.signature
    return type(record), getattr(record, "number", None)


def references_of(record: Record) -> Iterator[Hashable]:
    """Yield the names of what a record refers to."""
    match record:
        case Signature():
            yield from ((Values, number) for number in numbers_of((record.args, record.kwargs)) if number is not None)
            # what was seen of its later calls belongs to it
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


@dataclass(frozen=True, slots=True)
class RecordingLimits:
    """Where a recording ends although the program goes on.

    Attributes
    ----------
    calls : after so many calls
    bytes : after so many bytes before compression, whole values included
    memory : once what is kept of the program takes about so many bytes
    """

    calls: int | None = None
    bytes: int | None = None
    memory: int | None = None

    def is_over_memory(self, recorder: Recorder) -> bool:
        """Return True if a recorder keeps more than the limit."""
        if self.memory is None:
            return False
        return len(recorder.signatures) * SIGNATURE_BYTES + recorder.threads.waiting * INTEGER_BYTES > self.memory

    def __bool__(self) -> bool:
        return self.calls is not None or self.bytes is not None or self.memory is not None


def parts_within(
    block: ThreadCalls, pairs: Mapping[int, tuple[int, int, int]], held: Definitions, room: int
) -> tuple[ThreadCalls, ThreadCalls]:
    """Return a block's first calls, which likely fit in `room` bytes, but at least one, and the others.

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
