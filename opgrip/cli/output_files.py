"""Files that commands write, and compressed files that they read."""

from __future__ import annotations

import errno
import gzip
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol, cast

from opgrip.errors import ExistingFileError, MissingFileError, UserError

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


CHUNK = 1 << 16
"""Number of bytes that are read or decompressed at a time."""
ADDRESS = re.compile(r"(https?|ftp|s3|gs|hf):/+")
"""Start of an address that is not a path."""


class ByteSink(Protocol):
    """What a trace is written to. After `flush`, all that was written can be read from the file."""

    def write(self, data: bytes, /) -> int: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Damage(Exception):
    """The file holds no more that can be read, by the reason."""


def compress_to(raw: IO[bytes], name: str) -> ByteSink:
    """A sink onto an open file, compressed as the name's suffix says: `.gz`, `.zst` or not at all."""
    if name.endswith(".gz"):
        # mtime=0: the same trace gives the same bytes
        return _GzipSink(raw)
    if name.endswith(".zst"):
        return cast(ByteSink, _zstandard().ZstdCompressor(level=9).stream_writer(raw, closefd=True))
    return raw


def check_compression(name: str) -> None:
    """Raise `UserError` where a name's suffix asks for a compression whose package is not installed."""
    if name.endswith(".zst"):
        _zstandard()


def read_chunks(path: Path) -> Iterator[bytes]:
    """The file's decompressed bytes, as far as they go.

    Raises
    ------
    Damage : after the last bytes that can be read, where the compressed stream is cut or broken
    UserError : where the file cannot be opened
    """
    if path.is_fifo():
        raise UserError(f"{path} is a pipe", "name a file: it is read more than once")
    try:
        with path.open("rb") as raw:
            yield from _decompress(raw, path.name)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if isinstance(error, FileNotFoundError):
            if address := ADDRESS.match(str(path)):
                # a path has one slash of two
                name = f"{address[1]}://{str(path)[address.end() :]}"
                raise MissingFileError(f"{name} is an address, and no file", "download it first") from error
            raise MissingFileError(f"{path} cannot be read", reason) from error
        if isinstance(error, IsADirectoryError):
            raise UserError(f"{path} is a folder", "name a file in it") from error
        raise UserError(f"{path} cannot be read", reason) from error


def _decompress(raw: IO[bytes], name: str) -> Iterator[bytes]:
    if name.endswith(".gz"):
        yield from _gunzip(raw)
    elif name.endswith(".zst"):
        yield from _unzstd(raw)
    else:
        while chunk := raw.read(CHUNK):
            yield chunk


def _gunzip(raw: IO[bytes]) -> Iterator[bytes]:
    decompressor = zlib.decompressobj(wbits=31)
    most = 16 * CHUNK
    while packed := raw.read(CHUNK):
        data = b""
        while packed or len(data) == most:
            if decompressor.eof:
                # files joined with `cat` hold several members
                decompressor = zlib.decompressobj(wbits=31)
            try:
                data = decompressor.decompress(packed, most)
            except zlib.error as error:
                raise Damage(f"its gzip data is broken ({error})") from error
            yield data
            packed = decompressor.unused_data if decompressor.eof else decompressor.unconsumed_tail
    if not decompressor.eof:
        raise Damage("its gzip data is cut")


def _unzstd(raw: IO[bytes]) -> Iterator[bytes]:
    zstandard = _zstandard()
    # files joined with `cat` hold several frames
    reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
    try:
        while chunk := reader.read(CHUNK):
            yield chunk
    except zstandard.ZstdError as error:
        raise Damage(f"its zstd data is broken ({error})") from error


class _GzipSink(gzip.GzipFile):
    """Gzip that reaches the file at every flush, and closes the file with itself."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__(fileobj=raw, mode="wb", filename="", compresslevel=6, mtime=0)
        self.raw = raw

    def flush(self, zlib_mode: int = zlib.Z_SYNC_FLUSH) -> None:
        super().flush(zlib_mode)

    def close(self) -> None:
        super().close()
        self.raw.close()


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise UserError("a .zst file needs the package zstandard", "pip install 'opgrip[zstd]'") from error
    return cast(Any, zstandard)  # type: ignore[no-any-return]
