"""Writer of a trace, record by record."""

from __future__ import annotations

import sys
from contextlib import suppress
from json import JSONEncoder
from json.encoder import c_make_encoder, encode_basestring  # type: ignore[attr-defined]
from pathlib import Path
from types import TracebackType
from typing import IO, cast

import msgspec

from opgrip.cli.output_files import ByteSink, abandon, compress_to, create, discard, give_name
from opgrip.errors import ExistingFileError
from opgrip.traces.codec.call_blocks import CallBlock, record_of
from opgrip.traces.codec.record_forms import to_json
from opgrip.traces.schema.records import Calls, Header, Record

# made once, because tests of programs replace functions of `json`
_encode = c_make_encoder(None, JSONEncoder().default, encode_basestring, None, ":", ",", False, False, False)


def encode_line(record: Record | CallBlock) -> bytes:
    if isinstance(record, CallBlock):
        record = record_of(record)
    if isinstance(record, Calls):
        return msgspec.json.encode(to_json(record)) + b"\n"
    line = "".join(_encode(to_json(record), 0))
    # lone surrogates, which file names can contain, are escaped to keep the file valid UTF-8
    return line.encode("utf-8", "backslashreplace") + b"\n"


class TraceWriter:
    """A trace file that is being written.

    path : path of the trace, whose suffix selects the compression; `-` for standard output
    """

    def __init__(self, path: str | Path, header: Header, force: bool = False) -> None:
        self.path = None if str(path) == "-" else Path(path)
        self._force = force
        # resolved now, so that a link created later is not followed
        self._target = None if self.path is None else self.path.resolve()
        self._file: IO[bytes] | None = None
        self._sink: ByteSink
        if self.path is not None:
            self._file = create(self.path, force)
            # `discard` closes this one if the compressing sink cannot be created
            self._sink = self._file
        else:
            # not sys.stdout: a command that writes a trace to standard output redirects its other output to stderr
            self._sink = cast(ByteSink, sys.__stdout__.buffer)  # type: ignore[union-attr]
        self.bytes_written = 0
        try:
            if self._file is not None and self.path is not None:
                self._sink = compress_to(self._file, self.path.name)
            self.write(header)
            self.flush()
        except BaseException:
            self.discard()
            raise

    @property
    def unfinished(self) -> Path | None:
        path = None if self._file is None else Path(self._file.name)
        return path if path is not None and path.exists() else None

    def write(self, record: Record | CallBlock) -> None:
        self.write_lines(encode_line(record))

    def write_lines(self, lines: bytes) -> None:
        self._sink.write(lines)
        self.bytes_written += len(lines)

    def flush(self) -> None:
        self._sink.flush()

    def close(self) -> None:
        if self.path is None:
            self._sink.flush()
            return
        self._sink.close()
        assert self._file is not None
        assert self._target is not None
        give_name(Path(self._file.name), self._target, self._force)

    def discard(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._sink.close()
            discard(self._file)

    def abandon(self) -> None:
        """Drop buffered output; a forked process calls this, because the file belongs to its parent."""
        if self._file is not None:
            abandon(self._file)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()
            return
        try:
            self.close()
        except ExistingFileError:
            # its message names the temporary file, which is complete
            raise
        except BaseException:
            self.discard()
            raise
