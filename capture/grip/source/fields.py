"""The classes of live objects, as far as code may read them off its arguments."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import FunctionType
from typing import Any

import numpy as np
import torch

from opgrip.capture.grip.source.names import Mention, Receiver
from opgrip.capture.grip.source.packages import is_imported

_ALL_CHILDREN = ("children", "modules", "named_children", "named_modules", "apply", "_modules")
_LEAVES = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type(None))


class Mentioned:
    """Tells whether code reads an attribute of a name off something whose class it does not tell."""

    def __init__(self, mentions: Iterable[Mention]) -> None:
        mentions = set(mentions)
        self._all = _Words(mention.attribute for mention in mentions)
        self._of_others = _Words(mention.attribute for mention in mentions if mention.receiver is Receiver.ANY)

    def of_others(self, name: str) -> bool:
        """Whether it is read off something else than the method's own object."""
        return name in self._of_others

    def as_field(self, name: str) -> bool:
        """Whether it is read off anything."""
        return name in self._all

    def all_children(self) -> bool:
        """Whether modules are gone through without naming them."""
        return any(name in self._all for name in _ALL_CHILDREN)


class Everything(Mentioned):
    """Tells that code reads each attribute."""

    def __init__(self) -> None:
        super().__init__([Mention(".*", Receiver.ANY)])


class _Words:
    """Names and patterns of names."""

    def __init__(self, words: Iterable[str]) -> None:
        self._names = set(words)
        self._patterns = [re.compile(word) for word in self._names if ".*" in word]

    def __contains__(self, name: str) -> bool:
        return name in self._names or any(pattern.fullmatch(name) for pattern in self._patterns)


def named_in(objects: Iterable[Any], mentioned: Mentioned) -> list[type | FunctionType]:
    """Classes and functions, of no imported package, of which or as which objects and what code reads off them are."""
    types_and_functions: dict[type | FunctionType, None] = {}
    objects_by_id: dict[int, Any] = {}
    queue = list(objects)
    for thing in queue:
        if id(thing) in objects_by_id or (isinstance(thing, _LEAVES) and is_imported(type(thing).__module__)):
            continue
        objects_by_id[id(thing)] = thing
        named = thing if isinstance(thing, type | FunctionType) else type(thing)
        if not is_imported(named.__module__ or ""):
            types_and_functions[named] = None
        if named is not thing:
            queue += _list_contents(thing, mentioned)
    return list(types_and_functions)


def words_in(objects: Iterable[Any]) -> set[str]:
    """The strings in containers that could be names."""
    words: set[str] = set()
    objects_by_id: dict[int, Any] = {}
    queue = list(objects)
    for thing in queue:
        if isinstance(thing, str):
            words.update([thing] * thing.isidentifier())
        elif id(thing) not in objects_by_id:
            objects_by_id[id(thing)] = thing
            if isinstance(thing, Mapping):
                queue += thing.values()
            elif isinstance(thing, list | tuple):
                queue += thing
    return words


def _list_contents(thing: Any, mentioned: Mentioned) -> Iterator[Any]:
    """What a container holds, or the fields of an object that code may read."""
    if isinstance(thing, enum.Enum):
        return
    if isinstance(thing, Mapping):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, list | tuple | AbstractSet):
        yield from thing
    elif isinstance(thing, torch.nn.Module):
        # code that is not taken in may go through them
        every = is_imported(getattr(type(thing).forward, "__module__", "")) or mentioned.all_children()
        # their names may stand in a list, over which `getattr` goes
        words = words_in(value for value in vars(thing).values() if isinstance(value, list | tuple))
        yield from (
            child for name, child in thing.named_children() if every or name in words or mentioned.as_field(name)
        )
    fields = dict(getattr(thing, "__dict__", {}))
    for cls in type(thing).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                fields.setdefault(name, getattr(thing, name))
    yield from (value for name, value in fields.items() if mentioned.as_field(name))
