"""What the pages of a Parquet file take when decompressed, by their own headers: the footer, which tells too, can lie.

The headers are structs of Thrift's compact protocol; Source: Apache Parquet's format, `PageHeader`, and Apache Thrift's
compact protocol.
"""

from __future__ import annotations

from typing import IO, Any

from opgrip.traces.errors import FormatError
from opgrip.traces.formats.nodes.wire import read_varint, unzigzag

MOST_PAGES = 100_000
MOST_HEADER = 1 << 16
"""Bytes of a page's header, which holds the least and the largest value of the page."""
MOST_DEPTH = 8
UNCOMPRESSED, COMPRESSED = 2, 3
"""Numbers of the header's fields that are its page's sizes."""
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 0, 1, 2, 3, 7, 8, 12
_VARINTS = (4, 5, 6)


def page_bytes(file: IO[bytes], metadata: Any, most: int) -> int:
    """Bytes of all pages when decompressed, or some number above `most`, where they are more.

    Parameters
    ----------
    metadata : of the file, as pyarrow has it

    Raises
    ------
    FormatError : where a header cannot be read, or there are more than `MOST_PAGES`
    """
    size = pages = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(metadata.num_columns)):
            # of a column without values no page is read
            if not column.num_values:
                continue
            place = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
            end = place + column.total_compressed_size
            while place < end:
                file.seek(place)
                uncompressed, compressed, header = _sizes(file.read(min(MOST_HEADER, end - place)))
                size += uncompressed
                pages += 1
                place += header + compressed
                if pages > MOST_PAGES:
                    raise FormatError(f"it has more than {MOST_PAGES:,} pages")
                if size > most:
                    return size
    return size


def _sizes(data: bytes) -> tuple[int, int, int]:
    """What a page takes decompressed and compressed, and its header, in bytes."""
    sizes: dict[int, int] = {}
    end = _read_struct(data, 0, 0, sizes)
    if sizes.get(UNCOMPRESSED, -1) < 0 or sizes.get(COMPRESSED, -1) < 0:
        raise FormatError("a page without its size")
    return sizes[UNCOMPRESSED], sizes[COMPRESSED], end


def _read_struct(data: bytes, place: int, depth: int, numbers: dict[int, int]) -> int:
    """Where a struct ends; its whole numbers by their fields' numbers."""
    if depth > MOST_DEPTH:
        raise FormatError("a page's header is nested too deeply")
    number = 0
    while True:
        kind, place = _byte(data, place)
        if kind == _STOP:
            return place
        if kind >> 4:
            number += kind >> 4
        else:
            value, place = read_varint(data, place)
            number = unzigzag(value)
        kind &= 15
        if kind in _VARINTS:
            value, place = read_varint(data, place)
            numbers[number] = unzigzag(value)
        else:
            place = _skip(data, place, kind, depth)


def _skip(data: bytes, place: int, kind: int, depth: int) -> int:
    """Where a value of some type ends."""
    if kind in (_TRUE, _FALSE):
        return place
    if kind == _BYTE:
        return place + 1
    if kind in _VARINTS:
        return read_varint(data, place)[1]
    if kind == _DOUBLE:
        return place + 8
    if kind == _BINARY:
        length, place = read_varint(data, place)
        return place + length
    if kind == _STRUCT:
        return _read_struct(data, place, depth + 1, {})
    # page headers have no lists, sets or maps
    raise FormatError(f"a page's header with a value of type {kind}")


def _byte(data: bytes, place: int) -> tuple[int, int]:
    if place >= len(data):
        raise FormatError("a page's header is cut")
    return data[place], place + 1
