"""Apache Thrift's compact protocol, as far as Parquet files have it: structs of numbered fields, without maps.

Source: Apache Thrift's description of its compact protocol.
"""

from __future__ import annotations

from typing import Any

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
