"""Types for the fields of records, conversion of untrusted JSON values to these types, and limits on their size."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from sys import float_info
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from opgrip.errors import FormatError, UserError

Json: TypeAlias = Any

NAME_LENGTH = 1 << 16  # maximum number of characters in the name of an operator, a module or a file, and in a message

LIMIT = 1 << 63  # upper limit of the magnitude of integers in a trace
LATEST_NS = 1 << 62  # limit of the times of calls, so that the difference of two times fits in 64 bits

Int64: TypeAlias = Annotated[int, Meta(ge=-LIMIT, le=LIMIT - 1)]
# type of a non-negative integer: a count, a number of a record, a size or a duration in ns
Count: TypeAlias = Annotated[int, Meta(ge=0, le=LIMIT - 1)]
Name: TypeAlias = Annotated[str, Meta(max_length=NAME_LENGTH)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
# type of the key of a tensor in a file of full values
TensorKey: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{32,128}\Z")]
# type of a device's name, not checked against torch, so that traces of devices that this machine lacks can be loaded
DeviceName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z_]+[0-9]*(:[0-9]+)?\Z")]


class AnyValue(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return True


if TYPE_CHECKING:
    Argument: TypeAlias = Any
else:

    class Argument(metaclass=AnyValue):
        pass


ID: Mapping[str, str] = {"key": "id"}
CLASS: Mapping[str, str] = {"key": "class"}  # metadata of a field whose JSON key is `class`
ALWAYS: Mapping[str, bool] = {"always": True}  # metadata of a field that is written even if it has its default value

# functions that read types which msgspec does not know, such as `torch.dtype`, by type
readers: dict[Any, Callable[[Any], Any]] = {}
writers: dict[Any, Callable[[Any], Any]] = {}  # functions that write types with the metaclass `AnyValue`, by type

_PLAIN_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_MESSAGE = re.compile(r"(?s)(.*?)(?: - at `(?:key in )?\$(.*?)`)?$")
_EXPECTED = re.compile(r"Expected `([^`]*)`(?:, got `\w+`)?(.*)")


def convert(value: Json, kind: Any, place: str = "") -> Any:
    """Convert parsed JSON to a value of type `kind`; JSON objects become dataclasses.

    place : name of the value in error messages
    """
    body = rename_keys(value, kind) if isinstance(value, dict) else value
    try:
        return msgspec.convert(body, kind, dec_hook=lambda kind, value: readers[kind](value))
    except msgspec.ValidationError as error:
        raise FormatError(_plain_message(str(error), value, place)) from error


def _plain_message(message: str, value: Json, place: str) -> str:
    text, path = _MESSAGE.fullmatch(message).groups()  # type: ignore[union-attr]
    steps = re.findall(r"[^.\[\]]+", path or "")
    for step in steps:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
    if expected := _EXPECTED.fullmatch(text):
        names, bound = expected.groups()
        if str(LIMIT - 1) in bound or str(LIMIT) in bound or names == "int":
            plain = "a 64-bit integer" if ">= 0" not in bound else "an integer of at least 0"
        else:
            plain = " or ".join(_PLAIN_TYPES.get(name, name) for name in names.split(" | "))
            plain += bound.replace(", got", "; its length is")
        text = f"expected {plain}, got {str(value)[:60]!r}"
    else:
        text = text.replace("Object missing required field `", "missing field `").replace("`", "'")
    where = ".".join(filter(None, (place, *steps)))
    return f"{where}: {text}" if where else text


@lru_cache(maxsize=256)
def json_keys(kind: Any) -> dict[str, str]:
    return {key_of(field): field.name for field in fields(kind)} if is_dataclass(kind) else {}


def key_of(field: Field[Any]) -> str:
    return str(field.metadata.get("key", field.name))


@lru_cache(maxsize=256)
def _has_other_keys(kind: Any) -> bool:
    return any(key != name for key, name in json_keys(kind).items())


def rename_keys(form: Mapping[str, Json], kind: Any) -> Mapping[str, Json]:
    if not _has_other_keys(kind):
        return form
    names = json_keys(kind)
    return {names[key]: item for key, item in form.items() if key in names}


def check_finite(tree: Json) -> None:
    level = [tree]
    while level:
        item = level.pop()
        if isinstance(item, dict | list):
            level += item.values() if isinstance(item, dict) else item
        elif isinstance(item, int | float) and not -float_info.max <= item <= float_info.max:
            raise FormatError("a number is beyond the range of a 64-bit float")


def integer(value: Json) -> int:
    if type(value) is not int or not -LIMIT <= value < LIMIT:
        raise FormatError(f"expected a 64-bit integer, got {str(value)[:60]!r}")
    return value


def elapsed_ns(value: Json) -> int:
    return int(convert(value, Count))


def integers(value: Json) -> list[int]:
    return list(convert(value, list[Int64]))


def text(value: Json) -> str:
    return str(convert(value, Name))


def sizes(value: Json) -> tuple[int, ...]:
    result: tuple[int, ...] = convert(value, tuple[Count, ...])
    return result


def device_name(value: Json) -> str:
    return str(convert(value, DeviceName))


LINE_BYTES = 16 << 20  # maximum number of bytes in one line
LINE_ITEMS = 1 << 20  # limit of lists, objects and their elements in a line; each takes about 70 bytes of memory
NESTING = 128  # functions on arguments recurse about four times per level of lists and objects
UNKNOWN_RECORDS = 20_000  # maximum number of records of types that the reader does not know
UNKNOWN_NAMES = 1_000  # maximum number of distinct unknown types and fields that are counted by name
# maximum number of set members or dictionary keys whose hash equals that of another one; each makes a lookup longer
COLLISIONS = 50


@dataclass(frozen=True, slots=True)
class Allowance:
    what: str
    least: int
    per_byte: float

    def of(self, file_bytes: int) -> int:
        return self.least + int(self.per_byte * file_bytes)


DECOMPRESSED = Allowance("bytes", 8 << 20, 100)
RECORDS = Allowance("records", 50_000, 0.1)
ITEMS = Allowance("values", 1 << 20, 5)


class SizeMeter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._packed_bytes = path.stat().st_size if path.name.endswith((".gz", ".zst")) else None
        self._totals: Counter[Allowance] = Counter()

    def check_pending(self, length: int) -> None:
        if length > LINE_BYTES:
            raise refusal(self._path, f"a line is longer than {LINE_BYTES >> 20} MB")

    def check_line(self, line: bytes) -> None:
        self.check_pending(len(line))
        packed_bytes = self._packed_bytes
        # each item has at least two characters
        if packed_bytes is None and len(line) <= LINE_ITEMS:
            return
        items = count_items(line)
        if items > LINE_ITEMS:
            raise refusal(self._path, f"a line holds more than {LINE_ITEMS:,} values")
        if packed_bytes is not None:
            for allowance, amount in ((DECOMPRESSED, len(line) + 1), (RECORDS, 1), (ITEMS, items)):
                self._totals[allowance] += amount
                if self._totals[allowance] > allowance.of(packed_bytes):
                    limit = f"{allowance.of(packed_bytes):,} {allowance.what}"
                    raise refusal(self._path, f"its {packed_bytes:,} bytes decompress to more than {limit}")

    def check_unknown(self, count: int) -> None:
        if count > UNKNOWN_RECORDS:
            raise refusal(self._path, f"more than {UNKNOWN_RECORDS:,} of its records have unknown types")


def refusal(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is refused ({reason})", "read it with --unbounded if you trust where it comes from")


def count_items(content: bytes) -> int:
    """Return at least the number of lists, objects and their elements in a JSON text."""
    return sum(map(content.count, (b",", b"[", b"{")))


def check_nesting(line: bytes, form: Any) -> None:
    if line.count(b"[") + line.count(b"{") <= NESTING:
        return
    level = [form]
    for _ in range(NESTING + 1):
        if not level:
            return
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
    raise FormatError(f"a line is nested more than {NESTING} levels deep")


def check_hashes(keys: Sequence[Hashable]) -> None:
    if len(keys) - len(set(map(hash, keys))) > COLLISIONS:
        raise FormatError(f"more than {COLLISIONS} keys of a dictionary have the same hash as others")
