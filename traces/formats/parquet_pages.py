"""What a Parquet file holds by its footer, and what its pages take when decompressed by their own headers.

The footer can lie, and pyarrow's own view of it ends the process where the statistics of a column have another length
than the column says, so that both are read here.

Source: Apache Parquet's format, `FileMetaData` and `PageHeader`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from opgrip.errors import FormatError
from opgrip.traces.formats.nodes.thrift import Struct, read_struct

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
