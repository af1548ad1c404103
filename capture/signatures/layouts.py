"""Parts of tensors that are sparse, quantized or nested, parts of packed parameters, and arguments of collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeGuard

import torch

from opgrip.capture.program.accelerators import accelerators, is_started
from opgrip.capture.torch_compat.torch_private import (
    group_of_name,
    is_plain,
    reduction_number,
    without_functions,
    without_modes,
)
from opgrip.errors import raise_if_from_program
from opgrip.traces.schema.arguments import GroupSpec, Opaque, ReductionSpec
from opgrip.traces.schema.python_objects import PACKED_BY, ObjectSpec
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
# namespaces of collectives that take a group's name
_FUNCTIONAL = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"})


def describe_script_object(value: torch.ScriptObject) -> GroupSpec | ReductionSpec | Opaque:
    """Return the spec of a process group or a reduction of torch; `Opaque` for any other script object."""
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
    if not _is_distributed():
        return False
    from torch import distributed

    return isinstance(value, distributed.ProcessGroup)


def describe_group(group: torch.distributed.ProcessGroup) -> GroupSpec:
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    return GroupSpec(group.group_name, group.name(), ranks, group.rank())


def with_groups(op: Hashable, described_args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace the names of process groups in a functional collective's arguments by their specs."""
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


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor, (N,) uint8, that has all the memory of a storage."""
    with without_modes(), without_functions():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def unpack(value: Any) -> ObjectSpec | None:
    name = value._type().qualified_name().removeprefix(_PREFIX)
    operator = _PACKED.get(name)
    if operator is None:
        return None
    with without_modes(), without_functions(), torch.no_grad():
        try:
            content = value.unpack()
            if name == "quantized.LinearPackedParamsBase" and content[0].is_floating_point():
                operator = "linear_prepack_fp16"
            elif name.startswith("quantized.Conv"):
                transposed = value.transpose()
                operator = operator.replace("conv", "conv_transpose") if transposed else operator
                of_output = (value.output_padding(),) if transposed else ()
                content += value.stride(), value.padding(), *of_output, value.dilation(), value.groups()
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            raise_if_from_program(error)
            # for example, an engine that cannot unpack
            return None
    return ObjectSpec(PACKED_BY + operator, content=content if isinstance(content, tuple) else (content,))


# operators that pack parameters, by class of the result
_PACKED = {
    "quantized.LinearPackedParamsBase": "linear_prepack",
    "quantized.Conv2dPackedParamsBase": "conv2d_prepack",
    "quantized.Conv3dPackedParamsBase": "conv3d_prepack",
    "quantized.EmbeddingPackedParamsBase": "embedding_bag_prepack",
}


def take_apart(tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[Hashable, ...]]:
    """Return the plain tensors of which a sparse or nested tensor consists, and its other properties."""
    if not is_plain(type(tensor)):
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
            # for example, a tensor on the meta device, which has no quantizer
    return (), ()


def describe_made_of(tensor: torch.Tensor, describe: DescribePart, fit: FitValues) -> MadeOf | None:
    if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
        return None
    parts, facts = take_apart(tensor)
    if tensor.is_nested and parts:
        sizes, strides, offsets = facts
        return Nested(describe(parts[0], fit), sizes, strides, offsets)  # type: ignore[arg-type]
    if len(parts) == 2:
        indices, values = parts
        # fit each row separately, because the rows are indices of different dimensions
        rows = tuple(None if indices.is_meta else fit(row) for row in indices)
        return Coo(describe(indices, lambda part: None), rows, describe(values, fit), bool(facts[0]))
    if len(parts) == 3:
        compressed, plain, values = parts
        return Compressed(
            # fit the lengths of the rows, so that generated rows are as uneven as the recorded ones
            describe(compressed, lambda indices: fit(indices.diff())),
            describe(plain, fit),
            describe(values, fit),
        )
    return facts[0] if facts else None  # type: ignore[return-value]


def is_pinned(tensor: torch.Tensor) -> bool:
    # torch could start an accelerator if it is asked
    return tensor.device.type == "cpu" and any(map(is_started, accelerators())) and tensor.is_pinned()


def _quantizer(tensor: torch.Tensor) -> PerTensor | PerChannel:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return PerTensor(tensor.q_scale(), tensor.q_zero_point())
    scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return PerChannel(tuple(scales.tolist()), tuple(zero_points.tolist()), tensor.q_per_channel_axis())


def _places(nested: torch.Tensor) -> tuple[Hashable, ...]:
    if nested.size(0) == 0:
        return (), (), ()
    sizes: Any = nested._nested_tensor_size()
    strides: Any = nested._nested_tensor_strides()
    offsets: Any = nested._nested_tensor_storage_offsets()
    return tuple(map(tuple, sizes.tolist())), tuple(map(tuple, strides.tolist())), tuple(offsets.tolist())
