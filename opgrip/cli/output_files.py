"""Output files that are written completely or not at all, input files that may be anything, and compressed files."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from select import select
from time import monotonic
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from opgrip.cli.command import printable
from opgrip.cli.plugins import needed
from opgrip.errors import ExistingFileError, MissingFileError, UserError

if TYPE_CHECKING:
    import pandas as pd

_FORMULA = re.compile(r"'*(?:[=@\t\r]|[+-](?!\d+(?:\.\d+)?$))")


def quoted(text: str) -> str:
    """Return a text for a cell of a .csv file, with `'` in front of what a spreadsheet would run as a formula."""
    return f"'{text}" if _FORMULA.match(text) else text


def unquoted(text: str) -> str:
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


PIPE_S = 30  # seconds in which a pipe must end
_parts = count()


def partial_path(path: Path) -> Path:
    # keep a link and replace its target
    path = path.resolve()
    stem, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}.part{os.getpid()}-{next(_parts)}{dot}{suffixes}")


def check_writable(path: Path, force: bool) -> None:
    if path.is_dir():
        raise UserError(f"{path} is a folder", "name a file in it")
    if path.exists() and not path.is_file():
        raise UserError(
            f"{path} is not a regular file", "name a regular file, or - for stdout if the command supports it"
        )
    if path.exists() and not force:
        raise ExistingFileError(f"{path} exists", "choose another name, or replace it with --force")
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written", f"the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path} cannot be written", f"the folder {path.parent} is not writable")


def check_output(path: Path | None, force: bool, suffixes: Sequence[str] = ()) -> None:
    if path is None:
        return
    if suffixes and (path.name in suffixes or not path.name.endswith(tuple(suffixes))):
        raise UserError(
            f"{path} is not the name of a {', '.join(suffixes[:-1])} or {suffixes[-1]} file",
            "choose a name with one of these suffixes",
        )
    check_writable(path, force)


def create(path: Path, force: bool) -> IO[bytes]:
    check_writable(path, force)
    try:
        return io.BufferedWriter(OwnFile(partial_path(path)))
    except OSError as error:
        raise cannot_be_written(path, error) from error


_fstat = os.fstat
MOST_COMPARED = 4096  # number of bytes at the end of a file that are read again when it is complete


def identity_of(number: int) -> tuple[int, int] | None:
    """Return device and inode of the file that an open descriptor refers to, or None if the descriptor is closed."""
    try:
        status = _fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class OwnFile(io.RawIOBase):
    """A new file, which is opened again if the program closes its descriptor or uses the number for another file."""

    # bound here, because tests of programs replace functions of modules
    _open, _close = staticmethod(os.open), staticmethod(os.close)
    _read, _write = staticmethod(os.pread), staticmethod(os.pwrite)
    _identity: tuple[int, int] | None = None

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.is_abandoned = False
        self._place = self._size = 0
        self._end = b""
        self._number = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._identity = identity_of(self._number)

    def fileno(self) -> int:
        if identity_of(self._number) != self._identity:
            number = self._open(self.name, os.O_RDWR | os.O_CLOEXEC)
            if identity_of(number) != self._identity:
                self._close(number)
                raise FileNotFoundError(errno.ENOENT, "another file replaced it", self.name)
            self._number = number
        return self._number

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        data = memoryview(data)
        written = len(data) if self.is_abandoned else self._write(self.fileno(), data, self._place)
        self._place += written
        if self._place >= self._size:
            self._size, self._end = self._place, bytes(data[max(0, written - MOST_COMPARED) : written])
        elif self._place > self._size - len(self._end):
            self._end = b""
        return written

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def close(self) -> None:
        try:
            if self._identity is not None and not self.is_abandoned:
                self._compare_end()
        finally:
            identity, self._identity = self._identity, None
            if identity is not None and identity_of(self._number) == identity:
                self._close(self._number)
            super().close()

    def _compare_end(self) -> None:
        content = self._read(self.fileno(), MOST_COMPARED + 1, self._size - len(self._end))
        if content != self._end:
            raise OSError(errno.EIO, "its end is not what was written", self.name)


def abandon(file: IO[bytes]) -> None:
    """Drop what is written to a temporary file from now on, in a forked process, whose parent owns the file."""
    cast(OwnFile, cast(io.BufferedWriter, file).raw).is_abandoned = True


def cannot_be_written(path: str | Path, error: BaseException) -> UserError:
    return UserError(f"{path} cannot be written", reason_of(error))


def reason_of(error: BaseException) -> str:
    return ((error.strerror if isinstance(error, OSError) else None) or str(error)).lower()


def open_ordinary(path: Path) -> IO[bytes]:
    """Open a file for reading and writing, or create it; raise `UserError` if it is a link, folder, pipe or device."""
    problem = UserError(f"{path} is not a regular file", "remove it")
    try:
        # opening a link would change its target, and opening a pipe would block
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
    if not force:
        try:
            os.link(part, path)
        except FileExistsError as error:
            raise ExistingFileError(f"{path} was created meanwhile", f"the new content is in {part}") from error
        except OSError:
            # not every file system has links
            if os.path.lexists(path):
                raise ExistingFileError(f"{path} was created meanwhile", f"the new content is in {part}") from None
        else:
            part.unlink()
            return
    part.replace(path)


def discard(file: IO[bytes]) -> None:
    with suppress(OSError):
        Path(file.name).unlink()


@contextmanager
def whole_file(path: Path, force: bool) -> Iterator[IO[bytes]]:
    """Open a temporary file for the block, and rename it to `path` if the block raises no exception."""
    target = path.resolve()
    file = create(path, force)
    try:
        with file:
            yield file
    except BaseException:
        discard(file)
        raise
    give_name(Path(file.name), target, force)


def write_text(text: str, path: Path, force: bool) -> None:
    with whole_file(path, force) as file:
        file.write(text.encode(errors="backslashreplace"))


def write_json(data: Any, path: Path, force: bool, **options: Any) -> None:
    write_text(json.dumps(data, indent=1, **options) + "\n", path, force)


def csv_text(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV text, in which formulas and unprintable characters are escaped."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(map(_csv_cell, row) for row in rows)
    return text.getvalue()


def _csv_cell(cell: Any) -> Any:
    if isinstance(cell, str):
        return quoted(printable(cell))
    return None if isinstance(cell, float) and cell != cell else cell


def write_parquet_table(frame: pd.DataFrame, file: IO[bytes], metadata: Mapping[bytes, bytes] | None = None) -> None:
    arrow, parquet = needed("pyarrow"), needed("pyarrow.parquet")
    table = arrow.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **(metadata or {})})
    parquet.write_table(table, file, compression="zstd")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Create a temporary folder for the block, and rename it to `path` if the block raises no exception."""
    if path.exists() or path.is_symlink():
        raise ExistingFileError(f"{path} exists", "name a folder that does not exist")
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


CHUNK = 1 << 16  # number of bytes that are read or decompressed at a time
ADDRESS = re.compile(r"(https?|ftp|s3|gs|hf):/+")  # start of an address that is not a path


class ByteSink(Protocol):
    """Stream to which the bytes of a trace are written; after `flush`, all of them are in the file."""

    def write(self, data: bytes, /) -> int: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Damage(Exception):
    """Raised after the last readable part of a damaged file; the message is the reason."""


def compress_to(raw: IO[bytes], name: str) -> ByteSink:
    """Return a stream that writes to an open file, compressed if `name` ends in `.gz` or `.zst`."""
    if name.endswith(".gz"):
        # mtime=0 makes equal traces equal bytes
        return _GzipSink(raw)
    if name.endswith(".zst"):
        return cast(ByteSink, needed("zstandard").ZstdCompressor(level=9).stream_writer(raw, closefd=True))
    return raw


def open_input(path: Path) -> IO[bytes]:
    """Open a file for reading; raise `UserError` if it is a folder, a pipe or a device, whose data may never end."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise UserError(f"{path} is a folder", "name a file in it")
    if not stat.S_ISREG(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "not a regular file"
        raise UserError(f"{path} is {kind}", "name a file, because the data is read more than once")
    # a file of the kernel, such as /proc/kmsg, would wait for data
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_secret(path: Path, most_bytes: int) -> bytes:
    """Return the first bytes of a file, or of a pipe such as `<(pass show salt)`."""
    if not path.is_fifo():
        with open_input(path) as file:
            return file.read(most_bytes)
    content, ends = b"", monotonic() + PIPE_S
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", 0) as pipe:
        while len(content) < most_bytes:
            if not select([pipe], [], [], max(ends - monotonic(), 0))[0]:
                raise UserError(f"{path} did not end within {PIPE_S} s", "name a file")
            if not (part := pipe.read(most_bytes - len(content))):
                break
            content += part
    return content


def read_input(path: Path, most_bytes: int, hint: str) -> bytes:
    with open_input(path) as file:
        content = file.read(most_bytes + 1) or b""
    if len(content) > most_bytes:
        raise UserError(f"{path} is larger than {most_bytes >> 20:,} MB", hint)
    return content


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, in pieces; raise `Damage` if its compressed data is broken."""
    try:
        with open_input(path) as raw:
            yield from _decompress(raw, path.name)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if isinstance(error, FileNotFoundError):
            if address := ADDRESS.match(str(path)):
                # Path has reduced two slashes to one
                name = f"{address[1]}://{str(path)[address.end() :]}"
                raise MissingFileError(f"{name} is a URL, not a file", "download it first") from error
            raise MissingFileError(f"{path} cannot be read", reason) from error
        raise UserError(f"{path} cannot be read", reason) from error


def _decompress(raw: IO[bytes], name: str) -> Iterator[bytes]:
    if name.endswith((".gz", ".tgz")):
        yield from _gunzip(raw)
    elif name.endswith(".zst"):
        yield from _unzstd(raw)
    else:
        while chunk := raw.read(CHUNK):
            yield chunk


def _gunzip(raw: IO[bytes]) -> Iterator[bytes]:
    decompressor = zlib.decompressobj(wbits=31)
    most = 16 * CHUNK
    is_first = True
    while packed := raw.read(CHUNK):
        if is_first and not packed.startswith(b"\x1f\x8b"):
            raise Damage("it is not compressed by gzip, although its name says so")
        is_first = False
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
    zstandard = needed("zstandard")
    # files joined with `cat` hold several frames
    reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
    try:
        while chunk := reader.read(CHUNK):
            yield chunk
    except zstandard.ZstdError as error:
        raise Damage(f"its zstd data is broken ({error})") from error


class _GzipSink(gzip.GzipFile):
    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__(fileobj=raw, mode="wb", filename="", compresslevel=6, mtime=0)
        self.raw = raw

    def flush(self, zlib_mode: int = zlib.Z_SYNC_FLUSH) -> None:
        super().flush(zlib_mode)

    def close(self) -> None:
        super().close()
        self.raw.close()
