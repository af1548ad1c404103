"""What sparse, quantized and nested tensors are made of, pinned memory, and arguments of collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeGuard

import torch

from opgrip.capture.program.accelerators import accelerators, is_started
from opgrip.capture.torch_compat.torch_private import group_of_name, reduction_number, without_functions, without_modes
from opgrip.errors import raise_if_from_program
from opgrip.traces.schema.arguments import GroupSpec, Opaque, ReductionSpec
from opgrip.traces.schema.tensor_specs import (
    COMPRESSED_LAYOUTS,
    COMPRESSES_ROWS,
    Compressed,
    Coo,
    MadeOf,
    Nested,
    PerChannel,
    PerTensor,
    TensorSpec,
)

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


FitValues = Callable[[torch.Tensor], int | None]
DescribePart = Callable[[torch.Tensor, FitValues], TensorSpec]

PLAIN = (torch.Tensor, torch.nn.Parameter)


def take_apart(tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[Hashable, ...]]:
    """The plain tensors that one of another layout is made of, and all else that tells it from others like it.

    Nothing for a layout that torch does not let be taken apart.
    """
    if type(tensor) not in PLAIN:
        return (), ()
    with without_modes(), without_functions(), torch.no_grad():
        try:
            if tensor.is_nested:
                return (tensor.values(),), _places(tensor)
            if tensor.layout is torch.sparse_coo:
                return (tensor._indices(), tensor._values()), (tensor.is_coalesced(),)
            if tensor.layout in COMPRESSED_LAYOUTS:
                by_row = tensor.layout in COMPRESSES_ROWS
                compressed = tensor.crow_indices() if by_row else tensor.ccol_indices()
                return (compressed, tensor.col_indices() if by_row else tensor.row_indices(), tensor.values()), ()
            if tensor.is_quantized:
                return (), (_quantizer(tensor),)
        except (RuntimeError, NotImplementedError) as error:
            raise_if_from_program(error)
            # such as a tensor on the meta device, whose quantizer nobody knows
    return (), ()


def describe_made_of(tensor: torch.Tensor, describe: DescribePart, fit: FitValues) -> MadeOf | None:
    """What a tensor is made of, as a signature holds it; None for a plain one, and where torch does not tell.

    Parameters
    ----------
    describe : gives the spec of a part, its values fitted by the function that it is given
    """
    if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
        return None
    parts, facts = take_apart(tensor)
    if tensor.is_nested and parts:
        sizes, strides, offsets = facts
        return Nested(describe(parts[0], fit), sizes, strides, offsets)  # type: ignore[arg-type]
    if len(parts) == 2:
        indices, values = parts
        # each row apart: their ranges are those of different dimensions
        rows = tuple(None if indices.is_meta else fit(row) for row in indices)
        return Coo(describe(indices, _no_values), rows, describe(values, fit), bool(facts[0]))
    if len(parts) == 3:
        compressed, plain, values = parts
        return Compressed(
            # the lengths of rows: drawn so, they are as uneven as they were
            describe(compressed, lambda indices: fit(indices.diff())),
            describe(plain, fit),
            describe(values, fit),
        )
    return facts[0] if facts else None  # type: ignore[return-value]


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's memory is pinned; not asked before an accelerator runs, since that may start it."""
    return tensor.device.type == "cpu" and _an_accelerator_runs() and tensor.is_pinned()


def _an_accelerator_runs() -> bool:
    return any(map(is_started, accelerators()))


def _quantizer(tensor: torch.Tensor) -> PerTensor | PerChannel:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return PerTensor(tensor.q_scale(), tensor.q_zero_point())
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return PerChannel(tuple(scales.tolist()), tuple(zero_points.tolist()), tensor.q_per_channel_axis())


def _places(nested: torch.Tensor) -> tuple[Hashable, ...]:
    """Sizes, strides and offsets of the tensors in a nested one."""
    if nested.size(0) == 0:
        return (), (), ()
    sizes: Any = nested._nested_tensor_size()
    strides: Any = nested._nested_tensor_strides()
    offsets: Any = nested._nested_tensor_storage_offsets()
    return tuple(map(tuple, sizes.tolist())), tuple(map(tuple, strides.tolist())), tuple(offsets.tolist())


def _no_values(tensor: torch.Tensor) -> None:
    return None
