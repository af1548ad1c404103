"""Arguments of a call as Python's source.

A trace may come from a stranger: text of it stands in the source as a literal of ASCII, and names only where they are
those of torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.traces.schema.arguments import DTYPES, LAYOUTS, MEMORY_FORMATS, GeneratorSpec, TensorSpec
from opgrip.traces.schema.tensor_specs import plain_name

DEVICE = "device"
"""The variable of a script that has the device it runs on."""
WIDTH = 110


class Literals:
    """Writes arguments.

    Parameters
    ----------
    tensor : the source of a tensor
    main_device : where the call worked; what was there goes where the script runs
    """

    def __init__(self, tensor: Callable[[TensorSpec], str], main_device: str) -> None:
        self._tensor = tensor
        self._kind = main_device.partition(":")[0]

    def device(self, name: str) -> str:
        """The source of a device: what was on the host beside an accelerator stays there."""
        return DEVICE if name.partition(":")[0] == self._kind or name != "cpu" else '"cpu"'

    def of(self, value: Any) -> str:
        """The source of an argument.

        Raises
        ------
        UserError : for one that no script can have
        """
        match value:
            case TensorSpec():
                return self._tensor(value)
            case torch.Size():
                return f"torch.Size({list(map(int, value))!r})"
            case list():
                return f"[{', '.join(map(self.of, value))}]"
            case tuple():
                return f"({', '.join(map(self.of, value))}{',' if len(value) == 1 else ''})"
            case dict():
                return f"{{{', '.join(f'{self.of(key)}: {self.of(item)}' for key, item in value.items())}}}"
            case torch.device():
                return f"torch.device({self.device(str(value))})"
            case GeneratorSpec(where, seed):
                return f"torch.Generator({self.device(where)}).manual_seed({int(seed)})"
        return plain(value)


def plain(value: Any) -> str:
    """The source of a number, a text, or a type of torch's."""
    match value:
        case None | bool() | int():
            return repr(value)
        case float():
            return _float(value)
        case complex():
            return f"complex({_float(value.real)}, {_float(value.imag)})"
        case str():
            return ascii(value)
        case torch.dtype() if plain_name(value) in DTYPES:
            return f"torch.{plain_name(value)}"
        case torch.layout() if plain_name(value) in LAYOUTS:
            return f"torch.{plain_name(value)}"
        case torch.memory_format() if plain_name(value) in MEMORY_FORMATS:
            return f"torch.{plain_name(value)}"
    raise UserError(f"an argument of the type {type(value).__name__} cannot stand in a script", "replay it: opreplay")


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "math.nan" if math.isnan(value) else f"{'-' if value < 0 else ''}math.inf"


def shape(sizes: Iterable[int]) -> str:
    """The source of a shape or of strides."""
    return plain_tuple([repr(int(size)) for size in sizes])


def plain_tuple(items: list[str]) -> str:
    """The source of a tuple."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def comment(text: object) -> str:
    """Text of a trace, as it can stand behind a `#`."""
    return ascii(str(text)[:200])[1:-1]
