"""Events of a Chrome trace one after the other, in memory that does not grow with the file."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any

EVENTS = "traceEvents"
MOST_CHARACTERS = 4 << 20
"""Of an event, or of another field of the file."""
SPACE = " \t\r\n"


class BrokenStream(ValueError):
    """That a file is no Chrome trace from some place on, by the reason."""


def events_of(chunks: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """The fields of a trace by their names; of the field of events, each by itself.

    A trace that is a list alone has events only.

    Raises
    ------
    BrokenStream : where it is cut, or is no JSON of this form
    """
    text = _Text(chunks)
    start = text.take("[{")
    if start == "[":
        yield from ((EVENTS, event) for event in text.items())
        return
    if text.peek() == "}":
        return
    while True:
        name = text.value()
        text.take(":")
        if name == EVENTS and text.peek() == "[":
            text.take("[")
            yield from ((EVENTS, event) for event in text.items())
        else:
            yield str(name), text.value()
        if text.take(",}") == "}":
            return


class _Text:
    """What is left of a file's text."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._scan = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0

    def items(self) -> Iterator[Any]:
        """The items of a list whose bracket was taken."""
        if self.peek() == "]":
            self.take("]")
            return
        while True:
            yield self.value()
            if self.take(",]") == "]":
                return

    def peek(self) -> str:
        """The next character that is no space."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise BrokenStream("it is cut")

    def take(self, characters: str) -> str:
        """The next character, which is one of these."""
        found = self.peek()
        if found not in characters:
            raise BrokenStream(f"{found!r} stands where one of {characters!r} should")
        self._at += 1
        return found

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            result = self._scanned()
            if result is None:
                self._read_twice_as_much()
            elif self._is_whole(*result) or not self._more():
                value, self._at = result
                return value

    def _is_whole(self, value: Any, end: int) -> bool:
        """Whether a value that ends there goes on nowhere; a number may."""
        return not isinstance(value, int | float) or self._text[end : end + 1] in (",", "]", "}", *SPACE)

    def _scanned(self) -> tuple[Any, int] | None:
        """A value and its end; None where what there is of it is no JSON yet."""
        try:
            return self._scan(self._text, self._at)
        except RecursionError as error:
            raise BrokenStream("it nests too deep") from error
        except ValueError:
            return None

    def _read_twice_as_much(self) -> None:
        """Read on after a value that is not whole: what is long is not scanned again for every chunk."""
        length = len(self._text) - self._at
        if length > MOST_CHARACTERS:
            raise BrokenStream("an event is no JSON, or too long")
        while len(self._text) - self._at < 2 * length:
            if not self._more():
                if len(self._text) - self._at == length:
                    raise BrokenStream("it is cut, or no JSON")
                return

    def _more(self) -> bool:
        """Read on; whether there was more."""
        for chunk in self._chunks:
            text = self._decode(chunk)
            if text:
                self._text = self._text[self._at :] + text
                self._at = 0
                return True
        return False
