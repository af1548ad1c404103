"""Files of other tools: what a format is, how a file's is found, and what a conversion loses.

A format is a file in `traces/formats`, or an entry point `opgrip.formats` of another package. Reading one evaluates,
imports and unpickles nothing that the file names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from opgrip.cli.case_slices import Cut
from opgrip.cli.output_files import Damage
from opgrip.cli.plugins import Registry
from opgrip.errors import FormatError, UserError
from opgrip.traces.io.shipped_traces import read_trace_chunks
from opgrip.traces.schema.limits import DECOMPRESSED, check_nesting
from opgrip.traces.schema.records import FORMAT, Dropped, Record, listed

if TYPE_CHECKING:
    from opgrip.traces.codec.call_blocks import CallBlock

HEAD_BYTES = 1 << 16
"""Of a file, as many as tell its format."""
MOST_BYTES = 1 << 30
"""Of a file that is read as a whole, decompressed."""
MOST_ITEMS = 8 << 20
"""Of a piece of JSON: lists, objects, and what stands in them."""
PACKED = (".gz", ".zst")
LOST_CALLS = 100_000
"""Calls that a report of losses names; others it counts."""


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file.

    Attributes
    ----------
    path : of the file, which a format of folders or of several files looks at
    suffix : of its name, without that of a compression, in small letters
    start : its first bytes, decompressed
    """

    path: Path
    suffix: str
    start: bytes


@dataclass(slots=True)
class Losses:
    """What one side of a conversion has and the other cannot hold.

    Attributes
    ----------
    defaults : what stands for things that the read format does not say, in words
    skipped : calls that were not converted, by operator and reason
    calls : what the written file lacks of calls: number in the trace, operator, and what
    """

    defaults: list[str] = field(default_factory=list)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def skip(self, op: str, reason: str, count: int = 1) -> None:
        """Count calls that are not converted."""
        self.skipped[op, reason] += count

    def lose(self, call: int, op: str, what: str) -> None:
        """Note something that a call has and the target cannot hold."""
        self.counts[what] += 1
        if len(self.calls) < LOST_CALLS:
            self.calls.append((call, op, what))

    def dropped(self) -> list[Dropped]:
        """The calls that were skipped, as the last record of a trace tells of them."""
        return listed(self.skipped)

    def as_json(self) -> dict[str, Any]:
        """What `--report` writes."""
        return {
            "defaults": self.defaults,
            "skipped": [{"op": op, "reason": reason, "count": n} for (op, reason), n in sorted(self.skipped.items())],
            "lost": dict(sorted(self.counts.items())),
            "calls": [{"call": call, "op": op, "lost": what} for call, op, what in self.calls],
        }


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file of another tool that is being read.

    Attributes
    ----------
    unbounded : whether it may be larger than a stranger's
    cut : which of the cases are read of a file that stands for more than it holds
    """

    path: Path
    losses: Losses = field(default_factory=Losses)
    unbounded: bool = False
    cut: Cut = field(default_factory=Cut)

    def places(self, count: int, most: int) -> Sequence[int]:
        """The numbers of the cases to read, of `count` that the file stands for.

        Raises
        ------
        UserError : for more than `most`, and where none is left
        """
        size = self.cut.size(count)
        if size > most and not self.unbounded:
            raise UserError(
                f"{self.path} stands for {count:,} cases, of which {most:,} are read at most",
                "take a part with --start and --stop, or some with --sample",
            )
        return self.cut.places(count)

    def chunks(self) -> Iterator[bytes]:
        """Its bytes, decompressed.

        Raises
        ------
        UserError : where it cannot be opened, is cut or broken, or decompresses to more than a stranger's may
        """
        most = MOST_BYTES
        if self.path.name.endswith(PACKED):
            most = min(most, DECOMPRESSED.of(self.path.stat().st_size))
        size = 0
        try:
            for chunk in read_trace_chunks(self.path):
                size += len(chunk)
                if size > most and not self.unbounded:
                    raise self.refusal(f"it holds more than {most >> 20:,} MB")
                yield chunk
        except Damage as damage:
            raise self.damage(str(damage)) from damage

    def lines(self) -> Iterator[str]:
        """Its lines as UTF-8, without their ends, in memory that does not grow with it."""
        rest = b""
        for chunk in self.chunks():
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > MOST_BYTES >> 6:
                raise self.refusal(f"a line is longer than {MOST_BYTES >> 26} MB")
            yield from (line.decode(errors="replace") for line in whole)
        if rest:
            yield rest.decode(errors="replace")

    def json(self) -> Any:
        """What it holds as JSON; names that stand twice in an object are an error, and so is too deep nesting."""
        content = b"".join(self.chunks())
        return self.parse(content)

    def parse(self, content: bytes | str, most_items: int = MOST_ITEMS) -> Any:
        """What a piece of it holds as JSON.

        Parameters
        ----------
        most_items : lists, objects and what stands in them, each of which takes up to 130 bytes of memory

        Raises
        ------
        UserError : where it is none, has a name twice in one object, nests too deep, or holds too many values
        """
        data = content.encode() if isinstance(content, str) else content
        if sum(map(data.count, (b",", b"[", b"{"))) > most_items and not self.unbounded:
            raise self.refusal(f"it holds more than {most_items:,} values")
        try:
            form = json.loads(data, object_pairs_hook=once)
            check_nesting(data, form)
        except (ValueError, RecursionError) as error:
            reason = "it nests too deep" if isinstance(error, RecursionError) else f"{error}"[:200]
            raise self.damage(reason) from error
        return form

    def damage(self, reason: str) -> UserError:
        """What to tell of a file that is not what its format asks for."""
        return UserError(f"{self.path} cannot be read ({reason})", "make it again")

    def refusal(self, reason: str) -> UserError:
        """What to tell of a file that goes beyond a bound."""
        return UserError(
            f"{self.path} is refused ({reason})", "read it with --unbounded if you trust where it comes from"
        )


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; raises `FormatError` where a name stands in it twice."""
    form = dict(pairs)
    if len(form) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise FormatError(f"{names.most_common(1)[0][0][:60]!r} stands twice in one object")
    return form


Read = Callable[[ForeignFile], Iterator["Record | CallBlock"]]
Write = Callable[[Any, IO[bytes], Losses], None]
WriteRecords = Callable[[Iterable[Record], IO[bytes], Losses], None]
WriteFolder = Callable[[Any, Path, Losses], None]


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file.

    Attributes
    ----------
    summary : whose it is and what it holds, for the help
    recognizes : whether a file that begins so is of it; no two formats take the same file
    read : its records, as those of a trace, calls as columns where it has them so; None where it is only written
    write : writes a trace; None where it is only read, or written by one of the next two
    write_records : writes the records of a trace as they come, so that it is never whole in memory; may go through
        them twice
    write_folder : writes a trace into an empty folder, for a format of several files
    suffixes : of names that are written in it where no format is named
    defaults : what stands for things that it does not say, in words; a header of a trace that was read has them
    has_cases : whether its files stand for cases that a `Cut` takes a part of
    is_collection : whether its files are tables of operators, of which many together are what one model is elsewhere
    """

    summary: str
    recognizes: Callable[[Head], bool]
    read: Read | None = None
    write: Write | None = None
    suffixes: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    write_records: WriteRecords | None = None
    write_folder: WriteFolder | None = None
    has_cases: bool = False
    is_collection: bool = False

    @property
    def is_written(self) -> bool:
        """Whether traces become files of it."""
        return any((self.write, self.write_records, self.write_folder))


formats: Registry[Format] = Registry("opgrip.traces.formats", "opgrip.formats")
"""Formats of other tools by name."""


def format_of(path: Path) -> str | None:
    """The name of the format that a file has by its content; None for a trace of ours, and where none takes it.

    Raises
    ------
    UserError : where the file cannot be opened
    """
    head = _head_of(path)
    first_line = head.start.partition(b"\n")[0]
    # a Parquet file of ours has the header's text too
    if first_line.startswith(b"{") and b'"type"' in first_line and f'"{FORMAT}"'.encode() in first_line:
        return None
    readable = ((name, format_) for name, format_ in formats.items() if format_.read is not None)
    return next((name for name, format_ in readable if format_.recognizes(head)), None)


def _head_of(path: Path) -> Head:
    packed = path.suffix in PACKED
    suffix = (Path(path.stem).suffix if packed else path.suffix).lower()
    start = b""
    try:
        if not path.is_dir():
            for chunk in read_trace_chunks(path):
                start += chunk
                if len(start) >= HEAD_BYTES:
                    break
    except Damage:
        pass
    return Head(path, suffix, start[:HEAD_BYTES])
