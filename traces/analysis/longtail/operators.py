"""Facts of a signature for long-tail analysis: bytes of its tensors, whether it moves data, whether it is dense."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from opgrip.traces.analysis.ranks.collectives import namespace_of
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.operator_arguments import Interface, interface_of, schema_of, written
from opgrip.traces.schema.records import OPERATOR, Signature

PRODUCTS = frozenset(
    {"mm", "addmm", "addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "int_mm"}
)
"""products of matrices and vectors"""
DENSE_PARTS = (
    *("convolution", "conv_depthwise", "thnn_conv", "attention", "lstm", "gru", "rnn_", "embedding", "fft_"),
    *("batch_norm", "layer_norm", "group_norm", "rms_norm"),
    *("max_pool", "avg_pool", "upsample_", "grid_sampler"),
)
"""parts of the names of other operators with kernels that do much work, backward operators included"""


@dataclass(frozen=True, slots=True)
class Operation:
    """Facts of a signature for the analysis.

    Attributes
    ----------
    argument_bytes, result_bytes : bytes of each tensor; elements that a stride of 0 repeats count once
    writes : for each argument, whether calls may write it
    shapes : key that distinguishes arguments in the same memory
    extents : bytes of each argument from the start of its memory to its end
    moves : True if it reads or writes elements; a view does not
    dense : see `is_dense`
    exchanges : True if it exchanges data with other processes or waits for them, which no kernel can speed up
    """

    op: str
    interface: Interface
    argument_bytes: tuple[int, ...]
    result_bytes: tuple[int, ...]
    writes: tuple[bool, ...]
    shapes: tuple[tuple[object, ...], ...]
    extents: tuple[int, ...]
    moves: bool
    dense: bool
    exchanges: bool


def operation_of(signature: Signature) -> Operation:
    """Return the facts of a signature."""
    interface = interface_of(signature)
    takes = interface.takes
    return Operation(
        signature.op,
        interface,
        tuple(map(bytes_of, takes)),
        tuple(map(bytes_of, interface.gives)),
        tuple(written(signature)),
        tuple((spec.shape, spec.stride, spec.offset, spec.dtype) for spec in takes),
        tuple(spec.extent for spec in takes),
        not _is_view(signature),
        is_dense(signature),
        namespace_of(signature) is not None,
    )


def is_dense(signature: Signature) -> bool:
    """Return True if the operator is one kernel that does much work.

    These are convolutions, matrix products, attention, recurrent layers, normalization, pooling, resampling, embedding
    lookups, functions of extensions and compiled regions.
    """
    if signature.kind != OPERATOR:
        return True
    name = signature.op.partition(".")[2].rpartition(".")[0].lstrip("_")
    return name in PRODUCTS or any(part in name for part in DENSE_PARTS)


def bytes_of(spec: TensorSpec) -> int:
    """Return the bytes of a tensor's elements."""
    if spec.stride is None:
        return sum(map(bytes_of, spec.parts))
    sizes = (size for size, step in zip(spec.shape, spec.stride, strict=True) if step or not size)
    return prod(sizes) * spec.dtype.itemsize


def _is_view(signature: Signature) -> bool:
    """Return True if a call returns its argument or a view of it, and writes nothing."""
    schema = schema_of(signature)
    if schema is None or any(written(signature)):
        return False
    return any(item.alias_info is not None for item in schema.returns)
