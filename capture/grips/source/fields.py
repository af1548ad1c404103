"""The classes of live objects, as far as code may read them off its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch

from opgrip.capture.grips.source.names import Mention, Receiver
from opgrip.capture.grips.source.packages import is_imported

_ALL_CHILDREN = ("children", "modules", "named_children", "named_modules", "apply", "_modules")
_LEAVES = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type, type(None))


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


class _Words:
    """Names and patterns of names."""

    def __init__(self, words: Iterable[str]) -> None:
        self._names = set(words)
        self._patterns = [re.compile(word) for word in self._names if ".*" in word]

    def __contains__(self, name: str) -> bool:
        return name in self._names or any(pattern.fullmatch(name) for pattern in self._patterns)


def classes_of(objects: Iterable[Any], mentioned: Mentioned) -> list[type]:
    """The classes, of no imported package, of objects and of what code may read off them."""
    found: dict[type, None] = {}
    seen: dict[int, Any] = {}
    queue = list(objects)
    for thing in queue:
        if isinstance(thing, _LEAVES) or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if not is_imported(type(thing).__module__):
            found[type(thing)] = None
        queue += _held(thing, mentioned)
    return list(found)


def _held(thing: Any, mentioned: Mentioned) -> Iterator[Any]:
    """What a container holds, or the fields of an object that code may read."""
    if isinstance(thing, Mapping):
        yield from thing.keys()
        yield from thing.values()
    elif isinstance(thing, list | tuple | AbstractSet):
        yield from thing
    elif isinstance(thing, torch.nn.Module):
        every = is_imported(type(thing).__module__) or mentioned.all_children()
        yield from (child for name, child in thing.named_children() if every or mentioned.as_field(name))
    fields = dict(getattr(thing, "__dict__", {}))
    for cls in type(thing).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name):
                fields.setdefault(name, getattr(thing, name))
    yield from (value for name, value in fields.items() if mentioned.as_field(name))
