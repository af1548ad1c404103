"""Output files that are complete or absent, and text that a spreadsheet must not run as a formula."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

from opgrip.cli.compressed_files import check_compression
from opgrip.errors import ExistingFileError, UserError

_FORMULA = re.compile(r"'*(?:[=@\t\r]|[+-](?!\d+(?:\.\d+)?$))")


def quoted(text: str) -> str:
    """A text as a cell of a .csv."""
    return f"'{text}" if _FORMULA.match(text) else text


def unquoted(text: str) -> str:
    """What `quoted` was given."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


_parts = count()


def partial_path(path: Path) -> Path:
    """Where a file is while it is being written; the suffixes, which tell its compression, stay."""
    # a link stays one: what it points to is replaced
    path = path.resolve()
    stem, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}.part{os.getpid()}-{next(_parts)}{dot}{suffixes}")


def check_writable(path: Path, force: bool) -> None:
    """Raise `UserError` where a file exists and may not be replaced, or cannot be written or compressed."""
    if path.is_dir():
        raise UserError(f"{path} is a folder", "name a file in it")
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no ordinary file", "name one that is, or - where the command takes it for stdout")
    if path.exists() and not force:
        raise ExistingFileError(f"{path} exists", "choose another name, or replace it with --force")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written", f"the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path} cannot be written", f"the folder {path.parent} does not allow it")
    # a capture or replay may take hours until it writes
    check_compression(path.name)


def create(path: Path, force: bool) -> IO[bytes]:
    """The open temporary file of `path`; `give_name` gives it its name."""
    check_writable(path, force)
    try:
        return partial_path(path).open("xb")
    except OSError as error:
        raise cannot_be_written(path, error) from error


def cannot_be_written(path: str | Path, error: BaseException) -> UserError:
    """Why a file cannot be written."""
    return UserError(f"{path} cannot be written", reason_of(error))


def reason_of(error: BaseException) -> str:
    """What the system says of an error, without its number."""
    return ((error.strerror if isinstance(error, OSError) else None) or str(error)).lower()


def open_ordinary(path: Path) -> IO[bytes]:
    """A file to read and write, made where there is none; `UserError` for a link or what is no file."""
    problem = UserError(f"{path} is no ordinary file", "remove it")
    try:
        # a link would be written through, and a pipe waited for
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise problem from error
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise problem
    return open(number, "r+b")


def give_name(part: Path, path: Path, force: bool) -> None:
    """Give a whole file that has a temporary name its own.

    Parameters
    ----------
    path : where it goes, as it was resolved when the file was begun: a link that somebody made since is replaced
    force : replace what has come to be there; else the temporary file stays

    Raises
    ------
    ExistingFileError : where there is something by now
    """
    if not force:
        try:
            os.link(part, path)
        except FileExistsError as error:
            raise ExistingFileError(f"{path} exists by now", f"what was written is {part}") from error
        except OSError:
            # not every file system has links
            if os.path.lexists(path):
                raise ExistingFileError(f"{path} exists by now", f"what was written is {part}") from None
        else:
            part.unlink()
            return
    part.replace(path)


def discard(file: IO[bytes]) -> None:
    """Remove a temporary file, if it is there."""
    with suppress(OSError):
        Path(file.name).unlink()


def abandon(file: IO[bytes]) -> None:
    """Let nothing that this process still holds of a temporary file reach it: after a fork, it is the parent's."""
    if file.closed:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


@contextmanager
def whole_file(path: Path, force: bool) -> Iterator[IO[bytes]]:
    """A file to write; it appears under its name when the block ends well, and never otherwise."""
    target = path.resolve()
    file = create(path, force)
    try:
        with file:
            yield file
    except BaseException:
        discard(file)
        raise
    give_name(Path(file.name), target, force)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """An empty folder to write into; it appears under its name when the block ends well, and never otherwise.

    Raises
    ------
    UserError : where there is something of this name, which is never replaced: a folder may hold anything
    """
    if path.exists() or path.is_symlink():
        raise ExistingFileError(f"{path} exists", "name a folder that does not")
    part = partial_path(path)
    try:
        part.mkdir()
    except OSError as error:
        raise cannot_be_written(path, error) from error
    try:
        yield part
        part.rename(path.resolve())
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
