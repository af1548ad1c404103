"""Dataclass fields that are computed on first access."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class LazyField(Generic[T]):
    """Descriptor of a dataclass field that is computed when it is first read; the dataclass must not have slots.

    The constructor takes the value, or a function that returns it.
    """

    def __init__(self, default: Callable[[], T] | None = None) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, item: None, owner: type) -> Callable[[], T]: ...

    @overload
    def __get__(self, item: object, owner: type) -> T: ...

    def __get__(self, item: object | None, owner: type) -> Callable[[], T] | T:
        if item is None:
            # the dataclass decorator takes this as the field's default
            if self._default is None:
                raise AttributeError(self._name)
            return self._default
        value: T | Callable[[], T] = item.__dict__[self._name]
        if callable(value):
            value = item.__dict__[self._name] = value()
        return value

    def __set__(self, item: object, value: T | Callable[[], T]) -> None:
        item.__dict__[self._name] = value


def is_made(item: object, name: str) -> bool:
    return not callable(item.__dict__[f"_{name}"])
