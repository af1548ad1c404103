"""Protocol buffers on the wire: messages of numbered fields, and of files of messages each with its length before it.

Chakra's messages are few and flat, so that the package protobuf is not needed for them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

from opgrip.errors import FormatError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MOST_MESSAGE = 16 << 20
"""Bytes of a message."""
MOST_FIELDS = 1 << 20
"""Of a message."""
WORD = 1 << 64

Field = tuple[int, int, "int | bytes"]
"""Number, wire type, and the value: bytes of what has a length, else an unsigned integer."""


def read_varint(data: bytes, place: int) -> tuple[int, int]:
    """A number at a place, and the place after it.

    Raises
    ------
    FormatError : where it is cut, or longer than 64 bits
    """
    number = shift = 0
    while True:
        if place >= len(data):
            raise FormatError("a number is cut")
        byte = data[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return number % WORD, place
        shift += 7
        if shift >= 70:
            raise FormatError("a number is longer than 64 bits")


def fields(data: bytes) -> Iterator[Field]:
    """The fields of a message.

    Raises
    ------
    FormatError : for bytes that are none
    """
    place = count = 0
    while place < len(data):
        tag, place = read_varint(data, place)
        number, kind = tag >> 3, tag & 7
        count += 1
        if not number or count > MOST_FIELDS:
            raise FormatError("a message with a field 0" if not number else "a message of too many fields")
        value: int | bytes
        if kind == VARINT:
            value, place = read_varint(data, place)
        elif kind in (FIXED64, FIXED32, BYTES):
            length = 8 if kind == FIXED64 else 4
            if kind == BYTES:
                length, place = read_varint(data, place)
            if length > len(data) - place:
                raise FormatError("a field is cut")
            value = data[place : place + length]
            place += length
            if kind != BYTES:
                value = int.from_bytes(value, "little")
        else:
            raise FormatError(f"a field of wire type {kind}")
        yield number, kind, value


def messages(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The messages of a file.

    Raises
    ------
    FormatError : where the file is cut, or a message is longer than one may be
    """
    data, place = b"", 0
    for chunk in chunks:
        data, place = data[place:] + chunk, 0
        while True:
            begin = _begin(data, place)
            if begin is None:
                break
            length, start = begin
            if length > MOST_MESSAGE:
                raise FormatError(f"a message of more than {MOST_MESSAGE >> 20} MB")
            if length > len(data) - start:
                break
            yield data[start : start + length]
            place = start + length
    if place < len(data):
        raise FormatError("it is cut")


def _begin(data: bytes, place: int) -> tuple[int, int] | None:
    """The length of a message and where it starts; None where the rest of the number is still to come."""
    if place >= len(data) or (len(data) - place < 10 and all(byte & 0x80 for byte in data[place:])):
        return None
    return read_varint(data, place)


def holds_more_fields(data: bytes, message: Any, most: int) -> bool:
    """Whether a message has more fields than some number, with those of messages inside of it; as far as it is whole.

    Parameters
    ----------
    message : its descriptor, of the package protobuf; a field there that is a message is looked into
    """
    remaining = [(0, len(data), message)]
    count = 0
    while remaining:
        place, end, kind = remaining.pop()
        by_number = kind.fields_by_number
        while place < end:
            count += 1
            if count > most:
                return True
            try:
                tag, place = read_varint(data, place)
                length, start = read_varint(data, place) if tag & 7 in (VARINT, BYTES) else (0, place)
            except FormatError:
                # the package will say so
                return False
            wire_type = tag & 7
            if wire_type == BYTES:
                field = by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    remaining.append((start, min(start + length, end), field.message_type))
                start += length
            place = start + {FIXED64: 8, FIXED32: 4}.get(wire_type, 0)
    return False


def signed(number: int) -> int:
    """What an unsigned number of 64 bits is as one with a sign."""
    return number - WORD if number >= WORD >> 1 else number


def unzigzag(number: int) -> int:
    """What a number stands for whose last bit is its sign."""
    return (number >> 1) ^ -(number & 1)


def double(number: int) -> float:
    """The float of 64 bits."""
    return float(struct.unpack("<d", struct.pack("<Q", number))[0])


def single(number: int) -> float:
    """The float of 32 bits."""
    return float(struct.unpack("<f", struct.pack("<I", number))[0])


def varint(number: int) -> bytes:
    """A whole number; one below zero as 64 bits."""
    number %= WORD
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def number_field(field: int, value: int) -> bytes:
    """A field that is a whole number."""
    return varint(field << 3 | VARINT) + varint(value)


def bytes_field(field: int, value: bytes | str) -> bytes:
    """A field that is a text, or a message."""
    data = value.encode(errors="replace") if isinstance(value, str) else value
    return varint(field << 3 | BYTES) + varint(len(data)) + data


def double_field(field: int, value: float) -> bytes:
    """A field that is a float of 64 bits."""
    return varint(field << 3 | FIXED64) + struct.pack("<d", value)


def framed(message: bytes) -> bytes:
    """A message with its length before it."""
    return varint(len(message)) + message
