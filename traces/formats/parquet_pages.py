"""What the footer and pages of a Parquet file say of their sizes, read by Thrift's compact protocol.

The footer can lie, and pyarrow's own view of it ends the process where the statistics of a column have another length
than the column says, so that both are read here.

Source: Apache Parquet's format, `FileMetaData` and `PageHeader`.

Source: Apache Thrift's description of its compact protocol.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from opgrip.errors import FormatError
from opgrip.traces.formats.nodes.wire import read_varint, unzigzag

MOST_DEPTH = 8
MOST_STRUCTS = 1 << 20
"""In one struct, for the memory that they take."""
_STOP, _TRUE, _FALSE, _BINARY, _LIST, _SET, _STRUCT = 0, 1, 2, 8, 9, 10, 12
_VARINTS = (4, 5, 6)
_BYTES = {_TRUE: 1, _FALSE: 1, 3: 1, 7: 8}
"""Of values of a fixed size: bools in lists, bytes and doubles."""

Struct = dict[int, Any]
"""Values by the fields' numbers: whole numbers, structs and lists of structs; others are left out."""


def read_struct(data: bytes) -> tuple[Struct, int]:
    """The struct at the start of some bytes, and where it ends.

    Raises
    ------
    FormatError : where it is cut, nested too deeply, or has too many structs or a kind of value that Parquet has not
    """
    reader = _Reader(data)
    return reader.struct(0), reader.place


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._structs = 0
        self.place = 0

    def struct(self, depth: int) -> Struct:
        self._structs += 1
        if self._structs > MOST_STRUCTS:
            raise FormatError(f"a struct has more than {MOST_STRUCTS:,} others")
        values: Struct = {}
        number = 0
        while True:
            head = self._byte()
            kind = head & 15
            if kind == _STOP:
                return values
            number = number + (head >> 4) if head >> 4 else unzigzag(self._varint())
            # a field's bool is in its head
            value = None if kind in (_TRUE, _FALSE) else self._value(kind, depth + 1)
            if value is not None:
                values[number] = value

    def _value(self, kind: int, depth: int) -> Any:
        """A value, or `None` for one that is left out."""
        if depth > MOST_DEPTH:
            raise FormatError("a struct is nested too deeply")
        if kind in _VARINTS:
            return unzigzag(self._varint())
        if kind == _STRUCT:
            return self.struct(depth)
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind == _BINARY:
            self._skip(self._varint())
        elif kind in _BYTES:
            self._skip(_BYTES[kind])
        else:
            raise FormatError(f"a struct has a value of type {kind}")
        return None

    def _list(self, depth: int) -> list[Struct] | None:
        head = self._byte()
        kind, size = head & 15, head >> 4
        if size == 15:
            size = self._varint()
        if kind == _STRUCT:
            return [self.struct(depth + 1) for _ in range(size)]
        for _ in range(size):
            self._value(kind, depth + 1)
        return None

    def _varint(self) -> int:
        number, self.place = read_varint(self._data, self.place)
        return number

    def _byte(self) -> int:
        self._skip(1)
        return self._data[self.place - 1]

    def _skip(self, size: int) -> None:
        self.place += size
        if self.place > len(self._data):
            raise FormatError("a struct is cut")


MAGIC = b"PAR1"
MOST_FOOTER = 16 << 20
"""Bytes: some ten thousand groups of rows of this project's tables."""
MOST_PAGES = 100_000
MOST_HEADER = 1 << 16
"""Bytes of a page's header, which holds the least and the largest value of the page."""


@dataclass(frozen=True)
class Chunk:
    """The values of a column in a group of rows.

    Parameters
    ----------
    values : how many
    start, size : bytes of its pages in the file
    """

    values: int
    start: int
    size: int


def chunks_of(file: IO[bytes]) -> list[Chunk]:
    """What the footer of a file lists.

    Raises
    ------
    FormatError : where it cannot be read, or has more than `MOST_FOOTER` bytes
    """
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 8))
    tail = file.read(8)
    size = int.from_bytes(tail[:4], "little")
    if len(tail) < 8 or tail[4:] != MAGIC or size > end - 8:
        raise FormatError("it has no footer")
    if size > MOST_FOOTER:
        raise FormatError(f"its footer has more than {MOST_FOOTER >> 20} MB")
    file.seek(end - 8 - size)
    footer, _ = read_struct(file.read(size))
    return [_chunk(column) for group in _structs(footer, 4) for column in _structs(group, 1)]


def page_bytes(file: IO[bytes], chunks: list[Chunk], most: int) -> int:
    """Bytes of all pages when decompressed, or some number above `most`, where they are more.

    Raises
    ------
    FormatError : where a header cannot be read, or there are more than `MOST_PAGES`
    """
    size = 0
    for pages, decompressed in enumerate(_pages(file, chunks)):
        size += decompressed
        if pages >= MOST_PAGES:
            raise FormatError(f"it has more than {MOST_PAGES:,} pages")
        if size > most:
            break
    return size


def _pages(file: IO[bytes], chunks: list[Chunk]) -> Iterator[int]:
    """The bytes of each page when decompressed."""
    for chunk in chunks:
        # of a column without values no page is read
        place, end = chunk.start, chunk.start + (chunk.size if chunk.values else 0)
        while place < end:
            file.seek(place)
            header, length = read_struct(file.read(min(MOST_HEADER, end - place)))
            decompressed, compressed = _number(header, 2), _number(header, 3)
            if decompressed < 0 or compressed < 0:
                raise FormatError("a page without its size")
            place += length + compressed
            yield decompressed


def _chunk(column: Struct) -> Chunk:
    facts = column.get(3)
    if not isinstance(facts, dict):
        raise FormatError("a column without its place")
    data = _number(facts, 9)
    start = min(data, _number(facts, 11, 0) or data)
    return Chunk(_number(facts, 5), start, _number(facts, 7))


def _number(values: Struct, number: int, default: int = -1) -> int:
    value = values.get(number, default)
    if not isinstance(value, int):
        raise FormatError(f"field {number} of a struct is no number")
    return value


def _structs(values: Struct, number: int) -> list[Any]:
    value = values.get(number, [])
    if not isinstance(value, list):
        raise FormatError(f"field {number} of a struct is no list")
    return value
