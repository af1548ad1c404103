"""JSON that is read piece by piece: the members of an object, and the items of one list in it."""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from opgrip.errors import FormatError
from opgrip.traces.schema.json_values import check_nesting


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, or raise `FormatError` if it has a duplicate name."""
    form = dict(pairs)
    if len(form) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise FormatError(f"{names.most_common(1)[0][0][:60]!r} occurs twice in one object")
    return form


MOST_VALUE = 16 << 20
"""Characters of a member, or of an item of the list."""


class CutText(FormatError):
    """The text ends before the object does."""


class TooLong(Exception):
    """A value is longer than `MOST_VALUE`."""


def members(
    chunks: Iterable[bytes], list_name: str, unbounded: bool = False, strict: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield names and values of an object's members, and for the list each item under the list's name.

    strict : refuse a duplicate name in an object and a list without an object around it; otherwise the last value of a
        duplicate name counts, and such a list yields its items

    Raise `FormatError` for text that is not such an object.
    Raise `CutText` if the text ends too early.
    Raise `TooLong` for a value of more than `MOST_VALUE` characters.
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
            raise FormatError("expected the name of a member")
        if strict and name in names:
            raise FormatError(f"{name[:60]!r} occurs twice in one object")
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
    def __init__(self, chunks: Iterator[bytes], unbounded: bool, strict: bool) -> None:
        self._chunks = chunks
        self._decode: Callable[[bytes], str] = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._unbounded = unbounded
        self._parse = json.JSONDecoder(object_pairs_hook=once if strict else None).raw_decode
        self._text = ""
        self._place = 0

    def peek(self) -> str:
        """Return the next character that is not a space."""
        while True:
            while self._place < len(self._text):
                if not self._text[self._place].isspace():
                    return self._text[self._place]
                self._place += 1
            if not self._more():
                raise CutText

    def expect(self, characters: str) -> str:
        """Skip and return the next character, which must be one of `characters`."""
        character = self.peek()
        if character not in characters:
            raise FormatError(f"expected {' or '.join(characters)}, got {character!r}")
        self._place += 1
        return character

    def value(self) -> Any:
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
                # more digits of a number may follow
                continue
            if isinstance(value, dict | list):
                check_nesting(self._text[self._place : end].encode(errors="replace"), value)
            self._place = end
            return value

    def _more(self) -> bool:
        """Read as much again as is in memory, so that a long value is not parsed again for every chunk."""
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
