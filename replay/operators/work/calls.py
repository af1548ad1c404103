"""One run of an operator as a formula sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from opgrip.traces.schema.arguments import leaves


@dataclass(frozen=True, slots=True)
class Schema:
    """What torch knows of an operator.

    Attributes
    ----------
    name : without the overload, and without the underscore of one that writes in place
    defaults : of all arguments in order, None where there is none
    positional : how many arguments stand before those that are named
    written, outs : names of arguments that are written, and of those that only take results
    tags : torch's own
    """

    name: str
    defaults: dict[str, Any]
    positional: int
    written: frozenset[str]
    outs: frozenset[str]
    tags: frozenset[str]


@cache
def schema_of(function: torch._ops.OpOverload) -> Schema:
    """What torch knows of an operator; asking it anew takes longer than most calls."""
    arguments, mutable = function._schema.arguments, function._schema.is_mutable
    packet = str(function._overloadpacket)
    return Schema(
        # names such as __and__ end in underscores and write nothing
        packet.removesuffix("_") if mutable and not packet.endswith("__") else packet,
        {item.name: item.default_value for item in arguments},
        sum(not item.kwarg_only for item in arguments),
        frozenset(item.name for item in arguments if item.alias_info is not None and item.alias_info.is_write),
        frozenset(item.name for item in arguments if item.is_out),
        frozenset(tag.name for tag in function.tags),
    )


@dataclass(frozen=True, slots=True)
class Call:
    """What an operator took and gave.

    Attributes
    ----------
    name : without the overload, and without the underscore of one that writes in place: `aten.add`, `mmcv._ext:nms`
    function : the operator of torch; None for a function that is none
    values : the arguments by their names, those that were left out with their defaults
    ins, outs : tensors among arguments and results
    """

    name: str
    function: torch._ops.OpOverload | None
    values: dict[str, Any]
    ins: tuple[torch.Tensor, ...]
    outs: tuple[torch.Tensor, ...]

    @property
    def elements(self) -> int:
        """Of the largest result; of all where the operator takes lists of tensors."""
        if self.name.startswith("aten._foreach_"):
            return sum(tensor.numel() for tensor in self.outs or tensors_among(self.values.get("self")))
        return max((tensor.numel() for tensor in self.outs), default=0)

    @property
    def argument_elements(self) -> int:
        """Elements of the largest argument."""
        return max((tensor.numel() for tensor in self.ins), default=0)

    @property
    def schema(self) -> Schema | None:
        """What torch knows of the operator; None of a function that is none."""
        return None if self.function is None else schema_of(self.function)


def call_of(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Call:
    """The call that was made so.

    Parameters
    ----------
    name : of a function that is no operator
    result : its result
    """
    ins, outs = tensors_among([args, kwargs]), tensors_among(result)
    if not isinstance(function, torch._ops.OpOverload):
        return Call(name, None, {**{str(place): value for place, value in enumerate(args)}, **kwargs}, ins, outs)
    schema = schema_of(function)
    values = {**schema.defaults, **dict(zip(schema.defaults, args, strict=False)), **kwargs}
    return Call(schema.name, function, values, ins, outs)


def tensors_among(tree: Any) -> tuple[torch.Tensor, ...]:
    """The tensors in lists, tuples and dictionaries."""
    return tuple(leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))


def operators(names: str) -> frozenset[str]:
    """Names of torch's operators, of words."""
    return frozenset(f"aten.{name}" for name in names.split())
