"""Files that are plain, gzip or zstd by their name, and that can be read up to wherever they were cut."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol, cast

from opgrip.errors import MissingFileError, UserError

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
