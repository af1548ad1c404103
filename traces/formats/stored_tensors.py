"""Few tensors of a third party's safetensors file, and members of a long JSON object, in bounded memory.

A file is the length of its header in 8 bytes, the header as JSON, and the tensors' bytes, to whose places the header
points: {"key": {"dtype": "I32", "shape": [4], "data_offsets": [0, 16]}}.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from opgrip.errors import FormatError
from opgrip.traces.io.foreign_files import once
from opgrip.traces.schema.limits import check_nesting

MOST_VALUE = 16 << 20
"""Characters of a member, or of an item of the list."""


class CutText(FormatError):
    """That the text ends before the object does."""


class TooLong(Exception):
    """A value that goes beyond the bound."""


def members(
    chunks: Iterable[bytes], list_name: str, unbounded: bool = False, strict: bool = True
) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's members; of the list each item, under the list's name.

    Parameters
    ----------
    strict : refuse a name that stands twice in an object, and a list that stands alone; else the name's last value
        counts, and the items are those of the list

    Raises
    ------
    FormatError : for text that is no such object
    CutText : where it ends too early
    TooLong : for a value of more than `MOST_VALUE` characters
    """
    text = _Text(iter(chunks), unbounded, strict)
    names: set[str] = set()
    if not strict and text.peek() == "[":
        yield from ((list_name, item) for item in _items(text))
        return
    text.expect("{")
    if text.peek() == "}":
        return
    while True:
        name = text.value()
        if not isinstance(name, str):
            raise FormatError("a value stands where a name should")
        if strict and name in names:
            raise FormatError(f"{name[:60]!r} stands twice in one object")
        names.add(name)
        text.expect(":")
        if name == list_name and text.peek() == "[":
            yield from ((name, item) for item in _items(text))
        else:
            yield name, text.value()
        if text.expect(",}") == "}":
            return


def _items(text: _Text) -> Iterator[Any]:
    text.expect("[")
    if text.peek() == "]":
        text.expect("]")
        return
    while True:
        yield text.value()
        if text.expect(",]") == "]":
            return


class _Text:
    """Text of which as much is in memory as one value takes."""

    def __init__(self, chunks: Iterator[bytes], unbounded: bool, strict: bool) -> None:
        self._chunks = chunks
        self._decode: Callable[[bytes], str] = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._unbounded = unbounded
        self._parse = json.JSONDecoder(object_pairs_hook=once if strict else None).raw_decode
        self._text = ""
        self._place = 0

    def peek(self) -> str:
        """The next character that is no space."""
        while True:
            while self._place < len(self._text):
                if not self._text[self._place].isspace():
                    return self._text[self._place]
                self._place += 1
            if not self._more():
                raise CutText

    def expect(self, characters: str) -> str:
        """Pass over the next character, which is one of these."""
        character = self.peek()
        if character not in characters:
            raise FormatError(f"{character!r} stands where {' or '.join(characters)} is to be")
        self._place += 1
        return character

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            try:
                value, end = self._parse(self._text, self._place)
            except json.JSONDecodeError as error:
                if not self._more():
                    raise CutText from error
                continue
            except (RecursionError, ValueError) as error:
                reason = "it nests too deep" if isinstance(error, RecursionError) else f"{error}"[:200]
                raise FormatError(reason) from error
            if end == len(self._text) and self._more():
                # of a number, more digits may follow
                continue
            if isinstance(value, dict | list):
                check_nesting(self._text[self._place : end].encode(errors="replace"), value)
            self._place = end
            return value

    def _more(self) -> bool:
        """Read as much again as there is, so that a long value is not parsed once for each chunk."""
        pieces = [self._text[self._place :]]
        length = len(pieces[0])
        if length > MOST_VALUE and not self._unbounded:
            raise TooLong
        added = 0
        for chunk in self._chunks:
            pieces.append(self._decode(chunk))
            added += len(pieces[-1])
            if added > length:
                break
        self._text, self._place = "".join(pieces), 0
        return added > 0


HEADER_BYTES = 4 << 20
TENSOR_BYTES = 256 << 20
"""Of a tensor that is read."""
DTYPE_OF = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAME_OF = {dtype: name for name, dtype in DTYPE_OF.items()}


def read_tensor(path: Path, key: str) -> torch.Tensor:
    """A tensor of a file.

    Raises
    ------
    FormatError : where the file cannot be opened, is none of safetensors, or does not hold it; or it is too large
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > HEADER_BYTES:
                raise FormatError("its header is too long")
            dtype, shape, begin, end = _place(_header(file.read(length)), key)
            file.seek(8 + length + begin)
            content = file.read(end - begin)
    except OSError as error:
        raise FormatError("it cannot be opened") from error
    if len(content) != end - begin:
        raise FormatError("it is cut")
    if not content:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if dtype == torch.bool:
        # a byte of a stranger's file may be neither 0 nor 1, which is no boolean; by numpy, as torch would do it in
        # several threads, after which a process hangs in its forks
        flat = torch.from_numpy(flat.numpy() != 0)
    return flat.view(dtype).reshape(shape)


def _header(text: bytes) -> dict[str, Any]:
    try:
        form = json.loads(text)
        check_nesting(text, form)
    except (ValueError, RecursionError) as error:
        raise FormatError("its header is no JSON") from error
    if not isinstance(form, dict):
        raise FormatError("its header is no object")
    return form


def _place(header: Mapping[str, Any], key: str) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    entry = header.get(key)
    if not isinstance(entry, dict):
        raise FormatError(f"it holds no tensor {key[:60]!r}")
    dtype = DTYPE_OF.get(str(entry.get("dtype")))
    shape, offsets = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if dtype is None or shape is None or offsets is None or len(offsets) != 2 or len(shape) > 64:
        raise FormatError(f"its tensor {key[:60]!r} is of no kind that is known")
    begin, end = offsets
    if end - begin != prod(shape) * dtype.itemsize or end - begin > TENSOR_BYTES:
        raise FormatError(f"its tensor {key[:60]!r} is not as large as its shape, or too large")
    return dtype, shape, begin, end


def _sizes(value: Any) -> tuple[int, ...] | None:
    is_list = isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
    return tuple(value) if is_list else None


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A file of these tensors, whose dtypes are among `NAME_OF`."""
    header: dict[str, Any] = {}
    contents = []
    place = 0
    for key, tensor in tensors.items():
        # as bytes, which any dtype has, and numpy has not all of torch's
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        end = place + len(content)
        header[key] = {"dtype": NAME_OF[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        contents.append(content)
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(contents)
