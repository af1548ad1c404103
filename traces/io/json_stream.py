"""Incremental parser of untrusted JSON, which yields the members of an object, and the items of one list in it."""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from opgrip.errors import FormatError
from opgrip.traces.schema.json_values import check_nesting


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    form = dict(pairs)
    if len(form) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise FormatError(f"{names.most_common(1)[0][0][:60]!r} occurs twice in one object")
    return form


MOST_VALUE = 16 << 20  # maximum number of characters of a member, or of an item of the list


class CutText(FormatError):
    pass


class TooLong(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Repair:
    """Rules for skipping items of a list that are not valid JSON.

    mark : name of a member that all items have, used to find the item after a broken one
    """

    mark: str
    skip: Callable[[str, int], None]


def members(
    chunks: Iterable[bytes], list_name: str, unbounded: bool = False, strict: bool = True, repair: Repair | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each member of a JSON object, and each item of its list `list_name` separately.

    strict : True to refuse an object with a duplicate name, and a list that is not in an object
    """
    text = _Text(iter(chunks), unbounded, strict, lenient=repair is not None)
    names: set[str] = set()
    if not strict and text.peek() == "[":
        yield from ((list_name, item) for item in _items(text, repair))
        return
    text.expect("{")
    if text.peek() == "}":
        return
    while True:
        name = text.value()
        if not isinstance(name, str):
            raise FormatError(f"expected the name of a JSON object's member, got {str(name)[:60]}")
        if strict and name in names:
            raise FormatError(f"{name[:60]!r} occurs twice in one object")
        names.add(name)
        text.expect(":")
        if name == list_name and text.peek() == "[":
            yield from ((name, item) for item in _items(text, repair))
        else:
            yield name, text.value()
        if text.expect(",}") == "}":
            return


def values(chunks: Iterable[bytes], unbounded: bool = False) -> Iterator[Any]:
    text = _Text(iter(chunks), unbounded, strict=True, lenient=False)
    while True:
        try:
            text.peek()
        except CutText:
            return
        yield text.value()


def _items(text: _Text, repair: Repair | None) -> Iterator[Any]:
    text.expect("[")
    is_first = True
    while True:
        if (is_first or repair is not None) and text.peek() == "]":
            text.expect("]")
            return
        is_first = False
        separator = ""
        try:
            item = text.value()
            with suppress(CutText):
                separator = text.expect(",]")
        except CutText:
            raise
        except FormatError as error:
            if repair is None:
                raise
            count = text.skip_items(repair.mark, error)
            repair.skip(str(error), count)
            if text.is_behind_list:
                return
            continue
        yield item
        if separator != ",":
            if not separator:
                raise CutText
            return


# pattern of the text after a broken item: an object, or the end of the list
_AFTER = re.compile(r',\s*(?P<item>\{)|\}\s*(?P<end>\])\s*(?:,\s*"|\})')
_AFTER_LENGTH = 1024
_TOKEN = 12  # maximum number of characters of a token that the end of the text may cut: an escaped surrogate pair
# maximum number of characters that are parsed without success to find the items after broken ones
MOST_TRIED = 4 * MOST_VALUE


class _Text:
    def __init__(self, chunks: Iterator[bytes], unbounded: bool, strict: bool, lenient: bool) -> None:
        self._chunks = chunks
        self._decode: Callable[[bytes], str] = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._unbounded = unbounded
        self._parse = json.JSONDecoder(object_pairs_hook=once if strict else None, strict=not lenient).raw_decode
        self._text = ""
        self._position = 0
        self._tried = 0
        self.is_behind_list = False
        """True after `skip_items` found the end of the list"""

    def peek(self) -> str:
        while True:
            while self._position < len(self._text):
                if not self._text[self._position].isspace():
                    return self._text[self._position]
                self._position += 1
            if not self._more():
                raise CutText

    def expect(self, characters: str) -> str:
        character = self.peek()
        if character not in characters:
            raise FormatError(f"expected {' or '.join(characters)}, got {character!r}")
        self._position += 1
        return character

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = self._parse(self._text, self._position)
            except json.JSONDecodeError as error:
                if not self._is_cut(error):
                    raise FormatError(error.msg) from error
                if not self._more():
                    raise CutText from error
                continue
            except (RecursionError, ValueError) as error:
                reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"{error}"[:200]
                raise FormatError(reason) from error
            if end == len(self._text) and self._more():
                # more digits of a number may follow
                continue
            if isinstance(value, dict | list):
                check_nesting(self._text[self._position : end].encode(errors="replace"), value)
            self._position = end
            return value

    def skip_items(self, mark: str, error: FormatError) -> int:
        checked, end = 0, None
        while True:
            cut = None
            for match in _AFTER.finditer(self._text, self._position + checked):
                if match["end"] is not None:
                    end = end or match.end("end") - self._position
                    continue
                position = match.start("item")
                has_mark = self._has_mark(position, mark)
                if has_mark:
                    return self._skip_to(position, mark)
                if has_mark is None:
                    cut = cut or match.start() - self._position
            length = len(self._text) - self._position
            checked = max(checked, length - _AFTER_LENGTH) if cut is None else cut
            if not self._more():
                if end is None:
                    raise error
                self.is_behind_list = True
                return self._skip_to(self._position + end, mark)

    def _skip_to(self, position: int, mark: str) -> int:
        skipped, self._position = self._text[self._position : position], position
        return max(skipped.count(f'"{mark}":'), 1)

    def _has_mark(self, position: int, mark: str) -> bool | None:
        try:
            value, _ = self._parse(self._text, position)
        except json.JSONDecodeError as error:
            self._tried += error.pos - position
            if self._tried > MOST_TRIED and not self._unbounded:
                raise TooLong from error
            return None if self._is_cut(error) else False
        except (RecursionError, ValueError):
            return False
        return mark in value

    def _is_cut(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _TOKEN

    def _more(self) -> bool:
        pieces = [self._text[self._position :]]
        length = len(pieces[0])
        if length > MOST_VALUE and not self._unbounded:
            raise TooLong
        added = 0
        # as much as is in memory, so that a long value is not parsed again for every chunk
        for chunk in self._chunks:
            pieces.append(self._decode(chunk))
            added += len(pieces[-1])
            if added > length:
                break
        self._text, self._position = "".join(pieces), 0
        return added > 0
