"""A journal: a file with the finished items of a run, so that an interrupted run can resume."""

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


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """Functions between items and JSON.

    Attributes
    ----------
    encode : returns data that `json` can write
    decode : returns the item for such data; may raise ValueError, TypeError, KeyError, IndexError or AttributeError for
        other input
    """

    encode: Callable[[T], Any]
    decode: Callable[[Any], T]


def other_options(stored: Any, identity: Mapping[str, Any]) -> str:
    """Return a description of a stored run that differs from the run described by `identity`."""
    return "of a run with other options"


class Journal(Generic[T]):
    """Items of a run, each on disk when `add` returns. The first line of the file identifies the run.

    The file stays until `remove` is called; a file without items is removed when the block ends.

    Parameters
    ----------
    path : the file; None to keep items in memory only
    identity : settings of the run; a stored run with other settings cannot be resumed
    resume : continue with the items of an earlier run
    replace : discard the items of an earlier run
    blamed : file to name in the error message if the journal cannot be written; None to name the journal
    describe : returns the description of a stored identity for the error message

    Attributes
    ----------
    items : items of earlier runs and added items

    Raises
    ------
    UserError : if there are items and neither `resume` nor `replace` is set, if they belong to another run or are
        damaged, or if the file cannot be written
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
                raise UserError(f"{path} holds the rows of an interrupted replay", hint)
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
        """Read the items, and return the total length of complete lines in bytes."""
        whole = 0
        for place, line in enumerate(file):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                if place:
                    self.items.append(self._codec.decode(record))
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                raise UserError(f"{path} is damaged in line {place + 1}", NEW_RUN) from error
            if not place and record != identity:
                raise UserError(f"{path} is {self._describe(record, identity)}", f"use the same options, or {NEW_RUN}")
            whole += len(line)
        return whole

    def add(self, item: T) -> None:
        """Add an item and write it to disk; raise `UserError` if it cannot be written."""
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
        """Close the file, and remove it if it has no items."""
        if self._file is None or self.path is None:
            return
        with suppress(OSError):
            # closing may write data that a full disk rejected in `add`
            self._file.close()
        if not self.items:
            with suppress(OSError):
                self.path.unlink()
