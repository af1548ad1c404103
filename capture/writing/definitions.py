"""What calls refer to, held in memory as long as a call that is kept needs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from opgrip.capture.torch_compat.torch_private import without_functions, without_modes
from opgrip.capture.writing.recording_limits import Pending, name_of, references_of
from opgrip.traces.analysis.redaction import Policy, Redaction
from opgrip.traces.io.writer import encode_line
from opgrip.traces.schema.records import Record, Signature, Thread


@dataclass(frozen=True, slots=True)
class _Line:
    """A record, as it stands in a file where it is not redacted first, its place among all, and what it refers to."""

    place: int
    content: bytes | Record
    references: tuple[Hashable, ...]
    is_signature: bool
    is_thread: bool


@dataclass(slots=True)
class DefinedNames:
    """What one file has.

    Attributes
    ----------
    redaction : of this file, whose value models it numbers; None where nothing is redacted
    written : how many lines of a name it has
    late : names that got others since
    signatures : how many it has
    """

    redaction: Redaction | None
    written: dict[Hashable, int] = field(default_factory=dict)
    late: set[Hashable] = field(default_factory=set)
    signatures: int = 0


class Definitions:
    """Records by what calls call them, for several files one after another.

    Redacted, they are so when they go to a file, each file by a redaction of its own: value models have other numbers
    then, which what was forgotten of one file would upset in the next.

    Parameters
    ----------
    privacy : how records are redacted; None where they are written as they are

    Attributes
    ----------
    file : what the file that is being written has
    """

    def __init__(self, privacy: Policy | None = None) -> None:
        self._privacy = privacy
        self._lines: dict[Hashable, list[_Line]] = {}
        self._count = 0
        self.begin_file()

    def begin_file(self) -> None:
        """What was given so far is not in the file to come."""
        self.file = DefinedNames(self.make_redaction())

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
                # numbered anew for each file
                self._lines.pop(name, None)
            self._lines.setdefault(name, []).append(line)
            self._count += 1
            if name in self.file.written:
                self.file.late.add(name)

    def lines_for(self, records: Iterable[Record]) -> bytes:
        """The lines that the file lacks of what records refer to, and of what came late of others in it."""
        names = {name for record in records for name in references_of(record)}
        lines: list[_Line] = []
        file = self.file
        for name in self._closure(names | file.late, lambda name: name in file.late or name not in file.written):
            own = self._lines.get(name, [])
            lines += own[file.written.get(name, 0) :]
            file.written[name] = len(own)
        file.late.clear()
        file.signatures += sum(line.is_signature for line in lines)
        contents = [line.content for line in sorted(lines, key=lambda line: line.place)]
        return b"".join(item if isinstance(item, bytes) else self.encode([item], file.redaction) for item in contents)

    def all_lines(self, redaction: Redaction | None) -> bytes:
        """Return the lines of all records that are held, for a file with a redaction of its own."""
        held = (line for lines in self._lines.values() for line in lines if not line.is_thread)
        contents = [line.content for line in sorted(held, key=lambda line: line.place)]
        return b"".join(item if isinstance(item, bytes) else self.encode([item], redaction) for item in contents)

    def encode(self, records: Iterable[Record], redaction: Redaction | None) -> bytes:
        """Return the lines of records, redacted if the file has a redaction."""
        if redaction is not None:
            # values are redacted by operators, which are no calls of the program
            with without_modes(), without_functions():
                records = [item for record in records for item in redaction.records(record)]
        return b"".join(map(encode_line, records))

    def prune(self, names: Iterable[Hashable]) -> None:
        """Forget all but what these names stand for, and what that refers to."""
        kept = set(self._closure(names, lambda name: True))
        self._lines = {name: lines for name, lines in self._lines.items() if name in kept}

    def _closure(self, names: Iterable[Hashable], is_asked: Callable[[Hashable], bool]) -> Iterator[Hashable]:
        """Names, and those of all that their records refer to, as far as they are asked for."""
        waiting, visited = list(names), set[Hashable]()
        while waiting:
            name = waiting.pop()
            if name not in visited and is_asked(name):
                visited.add(name)
                yield name
                waiting.extend(reference for line in self._lines.get(name, ()) for reference in line.references)
