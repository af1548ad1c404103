"""Unpacking of untrusted archives into a private temporary folder, with limits on size and number of files."""

from __future__ import annotations

import atexit
import io
import os
import shutil
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from opgrip.cli.output_files import CHUNK, Damage, read_chunks
from opgrip.errors import UserError, shortened
from opgrip.traces.io.foreign_files import MOST_BYTES, format_of, is_trace
from opgrip.traces.schema.json_values import DECOMPRESSED, refusal

SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.zst")
MOST_ENTRIES = 10_000  # maximum number of files, folders and links in an archive and the archives inside it
MOST_NESTED = 2  # maximum depth of archives inside archives
MOST_DIRECTORY = 4 << 20  # maximum number of bytes of a zip archive's directory, which is parsed as a whole
SHOWN = 5
# signature of the record at the end of a zip archive, signature of the record that refers to a longer directory, and
# size of the former
_END, _END_64, _END_BYTES = b"PK\5\6", b"PK\6\7", 22
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    Damage,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)

_folders: dict[tuple[Path, int, int], Path] = {}  # folders of unpacked archives, by path, size and modification time
_owned: list[tuple[int, Path]] = []  # temporary folders, each with the id of the process that created it


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES) and path.is_file()


def unpacked(path: Path, unbounded: bool = False) -> Path:
    """Return the file to read: `path` itself, the only readable file in an archive, or NAME for `archive.zip/NAME`."""
    if is_archive(path) and format_of(path) is None:
        return _only_file(path, _folder_of(path, unbounded))
    archive = next((parent for parent in path.parents if is_archive(parent)), None)
    if archive is None:
        return path
    folder, name = _folder_of(archive, unbounded), path.relative_to(archive)
    if ".." in name.parts or not (folder / name).exists():
        names = _listed([file.relative_to(folder) for file in _files_in(folder)])
        raise UserError(f"{archive} contains no {name}", f"it contains {names}")
    return folder / name


def _only_file(archive: Path, folder: Path) -> Path:
    while [item.is_dir() for item in folder.iterdir()] == [True] and format_of(folder) is None:
        (folder,) = folder.iterdir()
    if format_of(folder) is not None:
        return folder
    files = _files_in(folder)
    readable = [file for file in files if is_trace(file) or format_of(file) is not None]
    if len(readable) == 1:
        return readable[0]
    root = next(root for root in _folders.values() if folder.is_relative_to(root))
    if not files:
        raise UserError(f"{archive} is an empty archive", "create it again")
    if not readable:
        others = _listed([file.relative_to(root) for file in files])
        raise UserError(
            f"{archive} contains no readable file ({others})",
            "opgrip trace convert --formats lists which files of other tools are read",
        )
    names = [file.relative_to(root) for file in readable]
    raise UserError(f"{archive} contains several readable files ({_listed(names)})", f"name one: {archive}/{names[0]}")


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _listed(names: list[Path]) -> str:
    shown = [shortened(ascii(str(name))[1:-1], 60) for name in names[:SHOWN]]
    more = [f"{len(names) - SHOWN:,} more"] if len(names) > SHOWN else []
    return ", ".join([*shown, *more]) or "nothing"


def _folder_of(archive: Path, unbounded: bool) -> Path:
    facts = archive.stat()
    key = (archive.resolve(), facts.st_size, facts.st_mtime_ns)
    if key not in _folders:
        folder = Path(tempfile.mkdtemp(prefix=f"opgrip-{archive.name[:40]}-"))
        _folders[key] = folder
        _owned.append((os.getpid(), folder))
        try:
            _Unpacking(archive, unbounded).unpack(archive, folder, MOST_NESTED)
        except BaseException:
            del _folders[key]
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return _folders[key]


@atexit.register
def _remove_folders() -> None:
    # a fork that ends normally must not remove the folders of its parent
    for process, folder in _owned:
        if process == os.getpid():
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(slots=True)
class _Unpacking:
    archive: Path
    unbounded: bool
    entries: int = 0
    written: int = 0

    def unpack(self, path: Path, folder: Path, nested: int) -> None:
        try:
            files = self._files_in_zip(path) if path.suffix.lower() == ".zip" else self._files_in_tar(path)
            for name, content in files:
                target = self._target(folder, name)
                if target is None:
                    continue
                self._write(content, target)
                if nested and is_archive(target):
                    packed = target.rename(target.with_name(f"{target.name}.part"))
                    target.mkdir()
                    inner = packed.rename(target / f".{target.name}")
                    self.unpack(inner, target, nested - 1)
                    inner.unlink()
        except (*_BROKEN, OSError) as error:
            if isinstance(error, UserError):
                raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(f"{self.archive} cannot be read ({reason})", "create it again") from error

    def _target(self, folder: Path, name: str) -> Path | None:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/") or "\\" in name or "\0" in name:
            return None
        target = folder.joinpath(*parts)
        with suppress(OSError):
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                return target
        return None

    def _write(self, content: IO[bytes], target: Path) -> None:
        most = min(MOST_BYTES, DECOMPRESSED.of(self.archive.stat().st_size))
        with target.open("xb") as file:
            while chunk := content.read(CHUNK):
                self.written += len(chunk)
                if self.written > most and not self.unbounded:
                    raise refusal(self.archive, f"it contains more than {most >> 20:,} MB")
                file.write(chunk)

    def _count(self) -> None:
        self.entries += 1
        if self.entries > MOST_ENTRIES and not self.unbounded:
            raise refusal(self.archive, f"it contains more than {MOST_ENTRIES:,} files")

    def _files_in_zip(self, path: Path) -> Iterator[tuple[str, IO[bytes]]]:
        self._check_directory(path)
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                self._count()
                if entry.is_dir() or stat.S_ISLNK(entry.external_attr >> 16):
                    continue
                with archive.open(entry) as content:
                    yield entry.filename, content

    def _check_directory(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _END_BYTES - (1 << 16), 0))
            tail = file.read()
        position = len(tail) - _END_BYTES if tail[-_END_BYTES:].startswith(_END) else tail.rfind(_END)
        if position < 0 or len(tail) < position + _END_BYTES:
            raise zipfile.BadZipFile("it is cut")
        (size,) = struct.unpack_from("<L", tail, position + 12)
        is_long = tail[max(position - 20, 0) : position].startswith(_END_64)
        if (is_long or size > MOST_DIRECTORY) and not self.unbounded:
            raise refusal(self.archive, f"it contains more than {MOST_ENTRIES:,} files")

    def _files_in_tar(self, path: Path) -> Iterator[tuple[str, IO[bytes]]]:
        with tarfile.open(fileobj=io.BufferedReader(_Decompressed(self._chunks(path))), mode="r|") as archive:
            for entry in archive:
                self._count()
                if entry.isreg() and (content := archive.extractfile(entry)) is not None:
                    yield entry.name, content

    def _chunks(self, path: Path) -> Iterator[bytes]:
        most, size = min(MOST_BYTES, DECOMPRESSED.of(path.stat().st_size)), 0
        for chunk in read_chunks(path):
            size += len(chunk)
            if size > most and not self.unbounded:
                raise refusal(self.archive, f"it contains more than {most >> 20:,} MB")
            yield chunk


class _Decompressed(io.RawIOBase):
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, target: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        size = min(len(target), len(self._rest))
        target[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
