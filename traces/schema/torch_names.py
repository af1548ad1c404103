"""torch's types by the names that stand in a trace, and the other small things that arguments are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from opgrip.errors import FormatError

Json: TypeAlias = Any

LIMIT = 1 << 63
"""Bound of sizes, strides and offsets."""


def plain_name(value: object) -> str:
    """The name of a dtype, layout or memory format."""
    return str(value).removeprefix("torch.")


LAYOUTS: dict[str, torch.layout] = {
    name: layout for name in dir(torch) if isinstance(layout := getattr(torch, name), torch.layout)
}
MEMORY_FORMATS: dict[str, torch.memory_format] = {
    name: layout for name in dir(torch) if isinstance(layout := getattr(torch, name), torch.memory_format)
}
DTYPES: dict[str, torch.dtype] = {
    plain_name(dtype): dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)
}


def tensor_outline(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """A tensor in short: `float32[64,256]`."""
    return f"{plain_name(dtype)}[{','.join(map(str, shape))}]"


def sizes(body: Json) -> tuple[int, ...]:
    """A list of whole numbers from 0 on.

    Raises
    ------
    FormatError : for anything else
    """
    if not isinstance(body, list) or any(type(size) is not int or not 0 <= size < LIMIT for size in body):
        raise FormatError(f"{str(body)[:60]} is not a list of sizes")
    return tuple(body)


def device_name(body: Json) -> str:
    """A device's name, not checked against this torch: a trace of a device that this machine lacks still loads.

    Raises
    ------
    FormatError : for what can be no device's name
    """
    if not isinstance(body, str) or not re.fullmatch(r"[a-z_]+[0-9]*(:[0-9]+)?", body):
        raise FormatError(f"{str(body)[:60]!r} is not a device")
    return body
