"""What an operator's schema says of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.replay.operators.calling import Arguments

LEAVES_EMPTY = frozenset({"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"})
"""Operators whose results for a backward pass are empty on a CPU where there is none, and of any shape elsewhere."""

UNINITIALIZED = frozenset(
    {
        *(
            "empty",
            "empty_like",
            "empty_strided",
            "empty_permuted",
            "empty_quantized",
            "new_empty",
            "new_empty_strided",
        ),
        *("_empty_affine_quantized", "_empty_per_channel_affine_quantized"),
        *("resize", "resize_", "resize_as", "resize_as_"),
    }
)
"""Operators whose results hold whatever the memory held."""


@dataclass(frozen=True, slots=True)
class Named:
    """An operator by its parts.

    Attributes
    ----------
    packet, overload : as in `aten.sort.stable`
    schema : torch's; None where the operator is not registered here
    random : whether torch says that it draws random numbers
    """

    packet: str
    overload: str
    schema: Any
    random: bool

    @property
    def leaves_empty(self) -> bool:
        """Whether results that are empty say nothing."""
        return self.packet in LEAVES_EMPTY

    @property
    def uninitialized(self) -> bool:
        """Whether its results hold whatever the memory held."""
        return self.packet in UNINITIALIZED

    def bound(self, arguments: Arguments) -> dict[str, Any]:
        """A call's arguments by name, with those that it leaves out."""
        args, kwargs = arguments
        declared = self.schema.arguments if self.schema is not None else []
        values = {item.name: item.default_value for item in declared if item.has_default_value()}
        values |= {item.name: value for item, value in zip(declared, args, strict=False)}
        return values | kwargs


def named(function: Callable[..., Any], op: str | None) -> Named | None:
    """The operator that a call is of; None for a Python function."""
    parts = (op or "").split(".")
    if len(parts) != 3:
        return None
    overload: Any = function
    if not isinstance(overload, torch._ops.OpOverload):
        overload = torch.ops
        for part in parts:
            overload = getattr(overload, part, None)
    if not isinstance(overload, torch._ops.OpOverload):
        return Named(parts[1], parts[2], None, False)
    return Named(parts[1], parts[2], overload._schema, torch.Tag.nondeterministic_seeded in overload.tags)
