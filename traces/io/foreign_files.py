"""Files of other tools: the interface of a format, the detection of a file's format, and the losses of a conversion.

A format is a module in `traces/formats`, or an entry point `opgrip.formats` of another package. Readers never evaluate,
import or unpickle anything that a file names.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from opgrip.cli.option_types import Cut
from opgrip.cli.output_files import Damage
from opgrip.cli.plugins import Registry
from opgrip.errors import UserError
from opgrip.traces.io.json_stream import once
from opgrip.traces.io.shipped_traces import read_trace_chunks
from opgrip.traces.schema.json_values import DECOMPRESSED, check_nesting, count_items, refusal
from opgrip.traces.schema.records import FORMAT, Record

HEAD_BYTES = 1 << 16  # number of leading bytes from which the format of a file is detected
MOST_BYTES = 1 << 30  # maximum decompressed size of a file that is read whole
MOST_ITEMS = 8 << 20  # maximum number of lists, objects and their elements in a JSON document
PACKED = (".gz", ".zst")
LOST_CALLS = 100_000  # maximum number of calls that a report of losses lists; others are only counted


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file, from which formats recognize it."""

    path: Path
    suffix: str
    start: bytes


@dataclass(slots=True)
class Losses:
    """Content that a conversion between a trace and a file of another tool could not carry over.

    doubts : reasons why the calls may not represent the program
    calls : content that the written file lacks: index of the call, operator, description; the first `LOST_CALLS` only
    """

    defaults: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def skip(self, op: str, reason: str, count: int = 1) -> None:
        self.skipped[op, reason] += count

    def lose(self, call: int, op: str, what: str) -> None:
        self.counts[what] += 1
        if len(self.calls) < LOST_CALLS:
            self.calls.append((call, op, what))

    def as_json(self) -> dict[str, Any]:
        return {
            "defaults": self.defaults,
            "skipped": [{"op": op, "reason": reason, "count": n} for (op, reason), n in sorted(self.skipped.items())],
            "lost": dict(sorted(self.counts.items())),
            "calls": [{"call": call, "op": op, "lost": what} for call, op, what in self.calls],
        }


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file of another tool that is being read.

    path : path of the file, or of a folder if the format consists of folders
    unbounded : True if no limits apply, for a trusted file
    capture : for a profile with launches of CUDA graphs, a second profile, made while the program captured these graphs
    """

    path: Path
    losses: Losses = field(default_factory=Losses)
    unbounded: bool = False
    cut: Cut = field(default_factory=Cut)
    capture: Path | None = None

    def indices(self, count: int, most: int) -> Sequence[int]:
        size = self.cut.size(count)
        if size > most and not self.unbounded:
            raise UserError(
                f"{self.path} represents {count:,} cases, but at most {most:,} are read",
                "select a part with --start and --stop, or some with --sample",
            )
        return self.cut.places(count)

    def chunks(self, damages: list[str] | None = None) -> Iterator[bytes]:
        """Yield the decompressed bytes of the file.

        damages : list to which damage of the compressed file is added; None to raise an error
        """
        most = MOST_BYTES
        if self.path.name.endswith(PACKED):
            most = min(most, DECOMPRESSED.of(self.path.stat().st_size))
        size = 0
        try:
            for chunk in read_trace_chunks(self.path):
                size += len(chunk)
                if size > most and not self.unbounded:
                    raise self.refusal(f"it contains more than {most >> 20:,} MB")
                yield chunk
        except Damage as damage:
            if damages is None:
                raise self.damage(str(damage)) from damage
            damages.append(str(damage))

    def lines(self) -> Iterator[str]:
        rest = b""
        for chunk in self.chunks():
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > MOST_BYTES >> 6:
                raise self.refusal(f"a line is longer than {MOST_BYTES >> 26} MB")
            yield from (line.decode(errors="replace") for line in whole)
        if rest:
            yield rest.decode(errors="replace")

    def content(self, most_bytes: int = MOST_BYTES) -> bytes:
        content = bytearray()
        for chunk in self.chunks():
            content += chunk
            if len(content) > most_bytes and not self.unbounded:
                raise self.refusal(f"it contains more than {most_bytes >> 20:,} MB")
        return bytes(content)

    def parse(self, content: bytes | str, most_items: int = MOST_ITEMS) -> Any:
        data = content.encode() if isinstance(content, str) else content
        self.check(count_items(data), most_items, "it contains more than {:,} values")
        try:
            form = json.loads(data, object_pairs_hook=once)
            check_nesting(data, form)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"{error}"[:200]
            raise self.damage(reason) from error
        return form

    def check(self, count: int, most: int, reason: str) -> None:
        if count > most and not self.unbounded:
            raise self.refusal(reason.format(most))

    def damage(self, reason: str) -> UserError:
        return UserError(f"{self.path} cannot be read ({reason})", "create it again")

    def refusal(self, reason: str) -> UserError:
        return refusal(self.path, reason)


Read = Callable[[ForeignFile], Iterator[Record]]
Write = Callable[[Any, IO[bytes], Losses], None]
WriteFolder = Callable[[Any, Path, Losses], None]


@dataclass(frozen=True, slots=True)
class Format:
    """A file format of another tool.

    summary : origin and content of such files, for the help text
    recognizes : returns True for the beginning of a file of this format
    read : yields the records of a trace; None for write-only formats
    write : writes a trace; None for read-only formats and for formats of folders
    write_folder : writes a trace into an empty folder, for a format of several files
    suffixes : file name suffixes that select this format for writing if no format is named
    defaults : descriptions of defaults for content that the format lacks
    has_graphs : True if files contain launches of CUDA graphs, whose operators are in another profile
    is_collection : True if files are tables of operators, of which many together correspond to one model
    """

    summary: str
    recognizes: Callable[[Head], bool]
    read: Read | None = None
    write: Write | None = None
    suffixes: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    write_folder: WriteFolder | None = None
    has_cases: bool = False
    has_graphs: bool = False
    is_collection: bool = False

    @property
    def is_written(self) -> bool:
        return any((self.write, self.write_folder))


formats: Registry[Format] = Registry("opgrip.traces.formats", "opgrip.formats")  # formats of other tools, by name


def format_of(path: Path) -> str | None:
    """Return the name of the format of another tool's file or folder; None for a trace of opgrip or an unknown file."""
    head = head_of(path)
    if _is_trace(head):
        return None
    if all((path / name).is_file() for name in ("model.py", "weight_meta.py")):
        raise UserError(
            f"{path} is a sample of GraphNet, a program and not a recording", f"record it with opcapture --model {path}"
        )
    readable = ((name, format_) for name, format_ in formats.items() if format_.read is not None)
    return next((name for name, format_ in readable if format_.recognizes(head)), None)


def is_trace(path: Path) -> bool:
    return _is_trace(head_of(path))


def _is_trace(head: Head) -> bool:
    first_line = head.start.partition(b"\n")[0]
    return first_line.startswith(b"{") and b'"type"' in first_line and f'"{FORMAT}"'.encode() in first_line


def head_of(path: Path) -> Head:
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
