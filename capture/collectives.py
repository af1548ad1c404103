"""What collective operators take besides tensors: process groups and reductions."""

from __future__ import annotations

import sys

import torch

from opgrip.capture.torch_private import reduction_number
from opgrip.traces.arguments import GroupSpec, Opaque, ReductionSpec

_PREFIX = "__torch__.torch.classes."


def describe_script_object(value: torch.ScriptObject) -> GroupSpec | ReductionSpec | Opaque:
    """A custom object of the dispatcher as a signature holds it: what groups and reductions are, the type of others."""
    name = value._type().qualified_name().removeprefix(_PREFIX)
    if "torch.distributed.distributed_c10d" not in sys.modules:
        return Opaque(name)
    from torch import distributed

    if name == "c10d.ProcessGroup":
        group = distributed.ProcessGroup.unbox(value)
        ranks = tuple(distributed.get_process_group_ranks(group))
        return GroupSpec(group.group_name, group.name(), ranks, group.rank())
    if name == "c10d.ReduceOp":
        number = reduction_number(value)
        if number is None:
            return Opaque(name)
        kinds = distributed.ReduceOp.RedOpType.__members__
        names = (kind for kind, member in kinds.items() if member.value == number)
        return ReductionSpec(next(names, str(number)))
    return Opaque(name)
