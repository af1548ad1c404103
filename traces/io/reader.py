"""Reader of a trace as a stream of records; it never executes, imports or evaluates anything that the file names."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from opgrip.cli.command import printable
from opgrip.cli.option_types import Cut
from opgrip.cli.output_files import Damage
from opgrip.errors import FormatError, UserError, shortened
from opgrip.traces.codec.call_blocks import CallBlock, block_of, exact_sum, parse_block, record_of
from opgrip.traces.codec.record_forms import from_json, unknown_fields
from opgrip.traces.io.archives import unpacked
from opgrip.traces.io.foreign_files import ForeignFile, Losses, format_of, formats, head_of
from opgrip.traces.io.json_stream import CutText, TooLong, members
from opgrip.traces.io.shipped_traces import read_trace_chunks, trace_file
from opgrip.traces.schema.json_values import LIMIT, UNKNOWN_NAMES, SizeMeter, check_nesting
from opgrip.traces.schema.records import FORMAT, MAJOR, Calls, End, Header, Record, Signature

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # pattern of the escape sequence of one half of a surrogate pair


class TraceReader:
    """Iterator over the records of a trace file.

    unbounded : True to read a file that exceeds the limits in `json_values.py`; only for trusted files
    format_name : format in which to read the file, instead of the detected one
    capture : for a profile with launches of CUDA graphs, a second profile, made while the program captured these graphs

    missing : after the iteration, a description of the missing part of the file; None if it is complete
    unknown : number of ignored records and fields that this version does not know, by name of the record's type or the
        field
    records : number of records read, including ignored ones
    losses : content of another tool's file that a trace cannot hold, and content that the file lacks
    """

    def __init__(
        self,
        path: str | Path,
        unbounded: bool = False,
        format_name: str | None = None,
        cut: Cut = Cut(),
        capture: Path | None = None,
    ) -> None:
        self.path = unpacked(trace_file(path), unbounded)
        self.losses = Losses()
        self._unbounded = unbounded
        self._format_name = format_name
        self._cut = cut
        self._capture = capture
        self._meter: SizeMeter | None = None
        self.missing: str | None = None
        self.unknown: Counter[str] = Counter()
        self.records = 0
        self._unknown_records = 0
        self._counts: Counter[str] = Counter()
        # smallest and largest signature of each block's calls, and the largest signature of the file
        self._numbers: set[int] = set()
        self._largest = -1

    def __iter__(self) -> Iterator[Record]:
        for item in self._items():
            yield record_of(item) if isinstance(item, CallBlock) else item

    def columns(self) -> Iterator[Record | CallBlock]:
        """Yield all records, but `Calls` records as `CallBlock`, which holds arrays."""
        for item in self._items():
            yield block_of(item) if isinstance(item, Calls) else item

    def again(self) -> TraceReader:
        return TraceReader(self.path, self._unbounded, self._format_name, self._cut, self._capture)

    def blocks(self) -> Iterator[CallBlock]:
        if (self._format_name or format_of(self.path)) is not None:
            yield from (item for item in self.columns() if isinstance(item, CallBlock))
            return
        self.records = 1
        # an escape sequence can represent any letter of the type
        lines = (line for line in self.lines() if b'"calls"' in line or b"\\" in line)
        with suppress(Damage):
            yield from (item for item in self._records(lines) if isinstance(item, CallBlock))

    def _items(self) -> Iterator[Record | CallBlock]:
        self.missing, self.records = None, 0
        self._counts.clear()
        self._numbers.clear()
        self._largest = -1
        self.unknown.clear()
        self._unknown_records = 0
        name = self._format_name or format_of(self.path)
        self._check_options(name)
        if name is not None:
            yield from self._foreign(name)
            return
        ended = False
        try:
            for record in self._records(self.lines()):
                self.records += 1
                if record is not None:
                    self._count(record)
                    ended = isinstance(record, End)
                    yield record
        except Damage as damage:
            if not self.records:
                raise self._not_a_trace(str(damage)) from damage
            self.missing = f"{self.path} is damaged after record {self.records}: {damage}"
            return
        if not self.records:
            state = "is cut before its first record" if self.path.stat().st_size else "is empty"
            raise UserError(f"{self.path} {state}", "capture it again")
        if not ended:
            self.missing = f"{self.path} is cut after record {self.records}"

    def _check_options(self, name: str | None) -> None:
        format_ = formats.get(name) if name else None
        if not self._cut.takes_all and not (format_ and format_.has_cases):
            flags = "--start, --stop and --sample"
            raise UserError(f"{self.path} has no cases to select with {flags}", "remove these options")
        if self._capture is not None and not (format_ and format_.has_graphs):
            raise UserError(f"{self.path} is not a profile with launches of CUDA graphs", "remove --capture")

    def _foreign(self, name: str) -> Iterator[Record | CallBlock]:
        format_ = formats.get(name)
        if format_ is None or format_.read is None:
            raise UserError(f"{name} is not a readable format", f"choose one of {', '.join(readable_formats())}")
        self.losses = Losses(defaults=list(format_.defaults))
        try:
            file = ForeignFile(self.path, self.losses, self._unbounded, self._cut, self._capture)
            for record in format_.read(file):
                self.records += 1
                yield record
        except Damage as damage:
            # a format that reads the intact part of a cut file raises this after the last record
            if not self.records:
                raise UserError(f"{self.path} is a damaged {name} file: {damage}") from damage
            self.missing = f"{self.path} is damaged: {damage}"

    def _count(self, record: Record | CallBlock) -> None:
        if isinstance(record, CallBlock):
            self._counts["calls"] += len(record)
            if len(record):
                self._numbers |= {int(record.signature.min()), int(record.signature.max())}
            self._counts["duration_ns"] += exact_sum(record.duration_ns)
            if self._counts["duration_ns"] >= LIMIT:
                raise Damage("its calls took more ns in total than 64 bits can count")
        elif isinstance(record, Signature):
            self._counts["signatures"] += 1
            self._largest = max(self._largest, record.number)
        elif isinstance(record, Header) and self.records > 1:
            raise Damage("it has a second header, as if two traces were joined")
        elif isinstance(record, End):
            expected = {"calls": record.calls, "signatures": record.signatures}
            lost = [
                f"{self._counts[name]} of {count} {name}"
                for name, count in expected.items()
                if self._counts[name] < count
            ]
            if lost:
                raise Damage(f"it holds {' and '.join(lost)}")
            if self._counts["calls"] > record.calls:
                raise Damage(f"it holds {self._counts['calls']} calls, but its closing record counts {record.calls}")
            if strange := [number for number in sorted(self._numbers) if not 0 <= number <= self._largest]:
                raise Damage(f"calls refer to the signature {strange[0]}, which it lacks")

    def lines(self) -> Iterator[bytes]:
        pieces: list[bytes] = []
        length = 0
        meter = self._meter = None if self._unbounded else SizeMeter(self.path)
        for chunk in read_trace_chunks(self.path):
            *whole, rest = chunk.split(b"\n")
            for line in whole:
                line = b"".join((*pieces, line)) if pieces else line
                pieces.clear()
                if meter is not None:
                    meter.check_line(line)
                yield line
            if whole:
                length = 0
            pieces.append(rest)
            length += len(rest)
            if meter is not None:
                meter.check_pending(length)
        if last := b"".join(pieces):
            if meter is not None:
                meter.check_line(last)
            yield last

    def _records(self, lines: Iterator[bytes]) -> Iterator[Record | CallBlock | None]:
        for line in lines:
            # the first record is the header
            block = parse_block(line) if self.records else None
            yield self._record(line) if block is None else block

    def _record(self, line: bytes) -> Record | CallBlock | None:
        try:
            form = _parse(line)
        except (ValueError, RecursionError) as error:
            raise Damage("a line is cut or is not JSON") from error
        if not isinstance(form, dict) or not isinstance(form.get("type"), str):
            raise Damage("a line is not a JSON object with a `type`")
        if not self.records:
            self._check_header(form)
        try:
            if self._meter is not None:
                check_nesting(line, form)
            record = from_json(form)
        except (FormatError, RecursionError) as error:
            raise Damage(str(error)) from error
        if record is None:
            self._unknown_records += 1
            self._count_unknown(form["type"])
            if self._meter is not None:
                self._meter.check_unknown(self._unknown_records)
        else:
            for name in unknown_fields(form):
                self._count_unknown(f"{form['type']}.{name}")
        return block_of(record) if isinstance(record, Calls) else record

    def _count_unknown(self, name: str) -> None:
        self.unknown[name if name in self.unknown or len(self.unknown) < UNKNOWN_NAMES else "others"] += 1

    def _check_header(self, form: dict[str, object]) -> None:
        if form["type"] != "header" or form.get("format") != FORMAT:
            raise self._not_a_trace("its first line is not a header record")
        version = str(form.get("version"))
        major, _, _ = version.partition(".")
        if not major.isdecimal() or len(major) > 9:
            raise self._not_a_trace("its header has no valid format version")
        if int(major) > MAJOR:
            raise UserError(
                f"{self.path} has format version {version}, newer than the {MAJOR}.x that this opgrip reads",
                "pip install --upgrade opgrip",
            )

    def _not_a_trace(self, reason: str) -> UserError:
        kind = _kind_of(head_of(self.path).start)
        if kind is not None:
            what, hint = kind
            return UserError(f"{self.path} is not a trace, but {what}", hint)
        return UserError(f"{self.path} is not a trace ({reason})", _LISTED)


def readable_formats() -> list[str]:
    return [name for name, format_ in formats.items() if format_.read is not None]


def read(path: str | Path, unbounded: bool = False) -> Iterator[Record]:
    """Yield the records of a trace; if the file is cut, stop there without an error."""
    return iter(TraceReader(path, unbounded))


def read_header(path: str | Path, unbounded: bool = False) -> Header:
    for record in TraceReader(path, unbounded):
        assert isinstance(record, Header)
        return record
    raise AssertionError("the reader yielded no record and raised no error")


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse(line: bytes) -> Any:
    if _SURROGATE.search(line) is None:
        return msgspec.json.decode(line)
    # tables cannot hold half of a surrogate pair
    form = json.loads(line, parse_constant=refuse_constant)
    text = json.dumps(form, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(text)


_RECORD = "record the program with opcapture"
_SIMULATED = f"it has times and sizes, but no operators: {_RECORD}"
_LISTED = "make a trace with opcapture; opgrip trace convert --formats lists which files of other tools are read"
_EXPORT = "record a run of the model with opcapture; opcapture --model FILE.pt2 runs a program of torch.export"
_UNPACK = "unpack it, and name a file in it"
_SHAPES = """replay a row by opreplay --operator aten.mm --inputs '{"self": [M, K], "mat2": [K, N]}'"""
_RESULTS = "show it by opgrip results show"
_COLUMN = re.compile(r"[^\W\d][\w .()/%#-]*")
# maximum number of members or columns that are listed, and maximum number of characters of each
_NAMES, _NAME_LENGTH = 5, 40


# description of files that cannot be read as a trace and advice on them, by a pattern of their first bytes
_KINDS: Sequence[tuple[re.Pattern[bytes], tuple[str, str]]] = [
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), (what, hint))
    for pattern, what, hint in (
        (rb"version https://git-lfs", "a git LFS pointer to a file that is not here", "get the file by git lfs pull"),
        (
            rb"\xff\xfe|\xfe\xff|(?:[\t\n\r -~]\0){4}|(?:\0[\t\n\r -~]){4}",
            "text in UTF-16",
            "convert it by iconv -f UTF-16 -t UTF-8",
        ),
        (rb"\xef\xbb\xbf", "text with a byte order mark", "remove its first three bytes by tail -c +4"),
        (
            rb"PK\x03\x04.{26}(?:[^/\0]{1,200}/(?:models/|data/weights/|data/constants/|archive_format)|"
            rb"serialized_exported_program|serialized_state_dict)",
            "a program of torch.export and not a recording",
            "record it with opcapture --model FILE.pt2 -o program.jsonl",
        ),
        (rb"PK\x03\x04.*(?:data|constants)\.pkl|\x80\x02\x8a", "a pickle of torch.save, which is never read", _EXPORT),
        (rb"\x80[\x02-\x05]", "a pickle, which is never read", _EXPORT),
        (rb"PK\x03\x04", "a zip archive", "end its name in .zip"),
        (rb".{257}ustar", "a tar archive", "end its name in .tar, or .tar.gz if it is compressed"),
        (rb"\x1f\x8b", "compressed by gzip", "end its name in .gz"),
        (rb"\x28\xb5\x2f\xfd", "compressed by zstandard", "end its name in .zst"),
        (rb"7z\xbc\xaf\x27\x1c", "an archive of 7-Zip", _UNPACK),
        (rb"Rar!", "a RAR archive", _UNPACK),
        (rb"\xfd7zXZ", "compressed by xz", "decompress it by xz -d"),
        (rb"BZh[1-9]1AY", "compressed by bzip2", "decompress it by bzip2 -d"),
        (
            rb"PAR1",
            "a Parquet file without the columns op_name and args of BackendBench",
            f"{_RECORD}; opgrip results show prints results",
        ),
        (rb"SQLite format 3", "an SQLite database, as Nsight Systems exports", _RECORD),
        (rb"NVR\0", "a report of Nsight Compute", _RECORD),
        (rb"\x93NUMPY", "an array of NumPy", _RECORD),
        (rb".{6}\0\0\{\"", "a file of safetensors", _RECORD),
        (rb"\s*<(?:!doctype html|html)", "an HTML page", "download the file itself"),
        (rb"\s*<\?xml", "XML", _LISTED),
        (rb"(?:\w+,)*comm_type,comm_group,|(?:train_iter|Emb|atten_\w+)\s*:", "a workload of aicb", _SIMULATED),
        (rb"[A-Z_]{4,}(?:[ \t][^\n]*)?\r?\n\s*\d+\s*\r?\n", "a workload of ASTRA-sim or SimAI", _SIMULATED),
        (rb'\s*\{.*"nvbench"\s*:', "a result of nvbench", _RECORD),
        (rb'\s*\{.*"trace_hash"\s*:', "a result of opreplay", _RESULTS),
        (rb"(?:\s*#[^\n]*\n)*(?:\s*\w+\s*:[^\n{]*\n)*\s*\w+\s*:?\s*\{\s*\w+\s*[:{]", "a prototxt", _RECORD),
        (
            rb"(?:\s*#[^\n]*\n)*\s*(?:import|from) \w[\w.]*(?:\s+import\b| as |\s*\n|,)",
            "a Python program",
            "record it with opcapture -- FILE",
        ),
    )
]


def _kind_of(start: bytes) -> tuple[str, str] | None:
    kind_by_start = next((kind for pattern, kind in _KINDS if pattern.match(start)), None)
    return kind_by_start or _kind_of_json(start) or _kind_of_table(start)


def _kind_of_json(start: bytes) -> tuple[str, str] | None:
    text = start.lstrip()
    # a damaged record of a trace is not a file of another kind
    if not text.startswith((b"{", b"[")) or re.match(rb'\{\s*"type"', text):
        return None
    first, _, rest = text.partition(b"\n")
    names = list(_members(text))
    if text.startswith(b"["):
        return (f"a JSON list of objects with {_named('member', names)}", _LISTED) if names else None
    with suppress(ValueError, RecursionError):
        if isinstance(json.loads(first), dict) and rest.lstrip().startswith(b"{"):
            return (f"JSON lines with {_named('member', names)}", _LISTED)
    return (f"JSON with {_named('member', names)}", _LISTED) if names else None


def _members(text: bytes) -> Iterator[str]:
    with suppress(FormatError, CutText, TooLong):
        for name, value in members([text], "", strict=False):
            if not text.startswith(b"["):
                yield name
            elif isinstance(value, dict):
                yield from value
                return


def _kind_of_table(start: bytes) -> tuple[str, str] | None:
    lines = start.decode(errors="replace").splitlines()[:2]
    for separator in (",", "\t", ";"):
        with suppress(csv.Error):
            heading, row = (*csv.reader(lines, delimiter=separator), [], [])[:2]
            if len(row) == len(heading) > 1 and all(_COLUMN.fullmatch(name.strip()) for name in heading):
                hint = _LISTED
                columns = {name.strip().upper() for name in heading}
                # a batch or scales change what a row computes
                if {"M", "N", "K"} <= columns and not any(re.search("^B$|SCALE|QUANT", name) for name in columns):
                    hint = _SHAPES
                elif "median_us" in heading:
                    return "a result of opreplay", _RESULTS
                return (f"a CSV table with {_named('column', heading)}", hint)
    return None


def _named(noun: str, names: Sequence[str]) -> str:
    shown = ", ".join(printable(shortened(name.strip(), _NAME_LENGTH)) for name in names[:_NAMES])
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return f"the {noun}{'s' if len(names) > 1 else ''} {shown}{more}"
