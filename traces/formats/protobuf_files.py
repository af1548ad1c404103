"""Protocol buffers in untrusted files: message classes from a table, length-prefixed messages, and limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from opgrip.cli.plugins import needed
from opgrip.errors import FormatError, one_line

MOST_MESSAGE = 4 << 20  # maximum size in bytes of a length-prefixed message
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
TYPES = {"double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "uint32": 13}
TYPES |= {"fixed64": 6, "fixed32": 7, "sfixed32": 15, "sfixed64": 16, "sint32": 17, "sint64": 18}
MESSAGE = 11

# number and type of each field, by message and field; `[]` after a type marks a repeated field, `?` a member of the
# oneof `value`
Schema = Mapping[str, Mapping[str, tuple[int, str]]]


def make_message_classes(package: str, extra: str, schema: Schema) -> dict[str, Any]:
    needed("google.protobuf", extra)
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            plain = kind.rstrip("[]?")
            entry = message.field.add(name=field, number=number, label=3 if kind.endswith("[]") else 1)
            entry.type = TYPES.get(plain, MESSAGE)
            if entry.type == MESSAGE:
                entry.type_name = f".{package}.{plain}"
            if kind.endswith("?"):
                message.oneof_decl or message.oneof_decl.add(name="value")
                entry.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"{package}.{name}")) for name in schema}


def parse_message(message_class: Any, data: bytes) -> Any:
    try:
        return message_class.FromString(data)
    except Exception as error:
        # protobuf raises different errors for it, depending on its version
        raise FormatError("the bytes of a message do not match its protobuf type") from error


def message_from_json(message_class: Any, form: Any) -> Any:
    from google.protobuf import json_format

    if not isinstance(form, dict):
        raise FormatError(f"a node is not a JSON object: {str(form)[:60]}")
    try:
        # the names of types belong to an enumeration that is not declared here
        fields = {name: value for name, value in form.items() if name != "type"}
        return json_format.ParseDict(fields, message_class(), ignore_unknown_fields=True)
    except Exception as error:
        raise FormatError(f"a node does not match its protobuf type: {one_line(error, 100)}") from error


def with_length(message: bytes) -> bytes:
    length, prefix = len(message), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*prefix, length]) + message


def split_messages(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the messages of a file in which each message is preceded by its length."""
    data, position = b"", 0
    for chunk in chunks:
        data, position = data[position:] + chunk, 0
        while position < len(data):
            if len(data) - position < 10 and all(byte & 0x80 for byte in data[position:]):
                # the rest of the length is still to come
                break
            length, start = read_varint(data, position)
            if length > MOST_MESSAGE:
                raise FormatError(f"a message has more than {MOST_MESSAGE >> 20} MB")
            if length > len(data) - start:
                break
            yield data[start : start + length]
            position = start + length
    if position < len(data):
        raise FormatError("the file is cut")


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the variable-length integer at a position, and the position after it."""
    number = 0
    for index, byte in enumerate(data[position : position + 10]):
        number |= (byte & 0x7F) << 7 * index
        if not byte & 0x80:
            return number % (1 << 64), position + index + 1
    raise FormatError("the length of a message is cut or has more than 64 bits")


def has_more_fields(data: bytes, descriptor: Any, limit: int) -> bool:
    remaining = [(0, len(data), descriptor)]
    count = 0
    while remaining:
        position, end, kind = remaining.pop()
        by_number = kind.fields_by_number
        while position < end:
            count += 1
            if count > limit:
                return True
            try:
                tag, position = read_varint(data, position)
                length, start = read_varint(data, position) if tag & 7 in (VARINT, BYTES) else (0, position)
            except FormatError:
                # the parser will report it
                return False
            wire_type = tag & 7
            if wire_type == BYTES:
                field = by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    remaining.append((start, min(start + length, end), field.message_type))
                start += length
            position = start + {FIXED64: 8, FIXED32: 4}.get(wire_type, 0)
    return False
