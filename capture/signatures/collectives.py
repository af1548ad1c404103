"""What collective operators take besides tensors: process groups and reductions."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any, TypeGuard

import torch

from opgrip.capture.torch_compat.torch_private import group_of_name, reduction_number
from opgrip.traces.schema.arguments import GroupSpec, Opaque, ReductionSpec

_PREFIX = "__torch__.torch.classes."
_FUNCTIONAL = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"})
"""Namespaces of collectives that take a group by its name."""


def describe_script_object(value: torch.ScriptObject) -> GroupSpec | ReductionSpec | Opaque:
    """A custom object of the dispatcher as a signature holds it: what groups and reductions are, the type of others."""
    name = value._type().qualified_name().removeprefix(_PREFIX)
    if not _is_distributed():
        return Opaque(name)
    from torch import distributed

    if name == "c10d.ProcessGroup":
        return describe_group(distributed.ProcessGroup.unbox(value))
    if name == "c10d.ReduceOp":
        number = reduction_number(value)
        if number is None:
            return Opaque(name)
        kinds = distributed.ReduceOp.RedOpType.__members__
        names = (kind for kind, member in kinds.items() if member.value == number)
        return ReductionSpec(next(names, str(number)))
    return Opaque(name)


def is_group(value: object) -> TypeGuard[torch.distributed.ProcessGroup]:
    """Whether a value is a process group."""
    if not _is_distributed():
        return False
    from torch import distributed

    return isinstance(value, distributed.ProcessGroup)


def describe_group(group: torch.distributed.ProcessGroup) -> GroupSpec:
    """A process group as a signature holds it."""
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    return GroupSpec(group.group_name, group.name(), ranks, group.rank())


def with_groups(op: Hashable, described_args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a collective that takes its group by name, with what that group is.

    The name alone says nothing once the program has ended.
    """
    if getattr(op, "namespace", None) not in _FUNCTIONAL or not _is_distributed():
        return described_args
    schema: Any = getattr(op, "_schema", None)
    names: Sequence[str] = [argument.name for argument in schema.arguments]
    return tuple(
        _named_group(value) if name == "group_name" and type(value) is str else value
        for name, value in zip(names, described_args, strict=False)
    )


def _named_group(name: str) -> GroupSpec | str:
    group = group_of_name(name)
    return name if group is None else describe_group(group)


def _is_distributed() -> bool:
    return "torch.distributed.distributed_c10d" in sys.modules
