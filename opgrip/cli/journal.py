"""A file that stores the finished items of a long run, so that an interrupted run can resume."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Generic, TypeVar

from opgrip.cli.output_files import cannot_be_written, open_ordinary
from opgrip.errors import UserError

T = TypeVar("T")
NEW_RUN = "start again with --force"
LONGEST_LINE = 64 << 20  # maximum number of bytes of a record


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    encode: Callable[[T], Any]
    decode: Callable[[Any], T]


def other_options(stored: Any, identity: Mapping[str, Any]) -> str:
    return "of a run with other options"


class Journal(Generic[T]):
    """The finished items of a run, in memory and in a file, so that another run can continue with the others.

    path : the file; None to keep the items in memory only
    identity : settings of the run; a file that was written with other settings cannot be resumed
    """

    def __init__(
        self,
        path: Path | None,
        identity: Mapping[str, Any],
        codec: Codec[T],
        resume: bool,
        replace: bool,
        blamed: Path | None = None,
        describe: Callable[[Any, Mapping[str, Any]], str] = other_options,
    ) -> None:
        self.path, self._codec, self._blamed, self._describe = path, codec, blamed or path, describe
        self.items: list[T] = []
        self._file: IO[bytes] | None = None
        if path is None:
            return
        try:
            self._open(path, json.loads(json.dumps(identity)), resume, replace)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _open(self, path: Path, identity: Mapping[str, Any], resume: bool, replace: bool) -> None:
        exists = os.path.lexists(path)
        file = open_ordinary(path)
        try:
            if exists and not resume and not replace:
                hint = f"continue with --resume, or {NEW_RUN}"
                raise UserError(f"{path} contains the rows of an interrupted replay", hint)
            # a line without its end is an incomplete record
            file.truncate(self._read(file, path, identity) if resume else 0)
            if not file.seek(0, os.SEEK_END):
                file.write(json.dumps(identity).encode() + b"\n")
            file.flush()
        except BaseException:
            with suppress(OSError):
                file.close()
            if not exists:
                path.unlink()
            raise
        self._file = file

    def _read(self, file: IO[bytes], path: Path, identity: Mapping[str, Any]) -> int:
        whole = 0
        for place, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b"")):
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                break
            try:
                record = json.loads(line)
                if place:
                    self.items.append(self._codec.decode(record))
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                raise UserError(f"{path} is damaged in line {place + 1}", NEW_RUN) from error
            if not place and record != identity:
                difference = self._describe(record, identity)
                raise UserError(f"{path} contains rows {difference}", f"use the same options, or {NEW_RUN}")
            whole += len(line)
        return whole

    def add(self, item: T) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(self._codec.encode(item)).encode() + b"\n")
                self._file.flush()
            except OSError as error:
                raise self._cannot_write(error) from error
        self.items.append(item)

    def _cannot_write(self, error: OSError) -> UserError:
        assert self._blamed is not None, "a journal in memory is not written"
        return cannot_be_written(self._blamed, error)

    def __enter__(self) -> Journal[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._file is None or self.path is None:
            return
        with suppress(OSError):
            # closing may write data that a full disk rejected in `add`
            self._file.close()
        if not self.items:
            with suppress(OSError):
                self.path.unlink()
