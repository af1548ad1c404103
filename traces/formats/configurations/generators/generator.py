"""What a generator of arguments is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from opgrip.cli.plugins import Registry
from opgrip.traces.values import ValueModel


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a call: trees of values and `TensorSpec`."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Draw:
    """What a generator makes arguments with.

    Attributes
    ----------
    chance : random numbers, the same ones for a case whichever others are made
    device : of tensors
    number_of : makes a value model known, and gives the number that a `TensorSpec` refers to it by
    """

    chance: random.Random
    device: str
    number_of: Callable[[ValueModel], int]


Generate = Callable[[dict[str, Any], Draw], Arguments]
"""The arguments that an entry without macros describes; raises `ValueError` where it describes none."""

generators: Registry[Generate] = Registry("opgrip.traces.formats.configurations.generators", "opgrip.generators")
"""Generators by the names that stand in files."""
