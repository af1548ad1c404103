"""Samples from a trace: the calls of an operator as a model made them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from opgrip.capture.models.operators.registered import Arguments, OperatorEntry
from opgrip.traces.schema.arguments import GeneratorSpec, Opaque, TensorSpec, leaves, map_leaves, tensors
from opgrip.traces.schema.records import OPERATOR, Signature
from opgrip.traces.table.trace import Trace
from opgrip.traces.values import ValueModel

if TYPE_CHECKING:
    from opgrip.capture.models.operators.operators_program import Coverage

MOST_BYTES = 1 << 32
"""largest tensor that is created, since a trace may name any size"""


def trace_entries(trace: Trace, functions: Mapping[str, Any], coverage: Coverage) -> Iterator[OperatorEntry]:
    """Yield the operators that a trace calls, with the calls' arguments as samples.

    Parameters
    ----------
    functions : overloads that may be called, by their names in a trace
    coverage : counts the calls that cannot be made
    """
    by_op: dict[str, list[Signature]] = {}
    for signature in trace.signatures:
        if signature.kind == OPERATOR and signature.op in functions:
            reason = _why_not(signature)
            if reason:
                coverage.fail(signature.op, "", reason)
            else:
                by_op.setdefault(signature.op, []).append(signature)
    for op, signatures in by_op.items():
        yield _entry(functions[op], signatures, trace.values)


def _entry(function: Any, signatures: list[Signature], values: Mapping[int, ValueModel]) -> OperatorEntry:
    by_dtype: dict[torch.dtype, list[Signature]] = {}
    for signature in signatures:
        first = next((spec.dtype for spec in tensors([signature.args, signature.kwargs])), torch.float32)
        by_dtype.setdefault(first, []).append(signature)

    def samples(device: str, dtype: torch.dtype, wants_grad: bool) -> Iterator[Arguments]:
        for signature in by_dtype[dtype]:
            yield _arguments(signature, values, device, wants_grad)

    is_mutable = function._schema.is_mutable
    return OperatorEntry(
        name=str(function),
        categories=frozenset(),
        function=function,
        dtypes=lambda device: tuple(by_dtype),
        differentiable=lambda device: frozenset() if is_mutable else _floating(by_dtype),
        samples=samples,
    )


def _floating(dtypes: Mapping[torch.dtype, Any]) -> frozenset[torch.dtype]:
    return frozenset(dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)


def _why_not(signature: Signature) -> str:
    tree = [signature.args, signature.kwargs]
    if signature.raised is not None:
        return "it raised when it was captured"
    if any(isinstance(leaf, Opaque) for leaf in leaves(tree)):
        return "an argument that a trace cannot hold"
    for spec in tensors(tree):
        if spec.stride is None or spec.made_of is not None or spec.cls is not None:
            return "a tensor that is not strided"
        if spec.extent > MOST_BYTES:
            return "a tensor that is too large"
    return ""


def _arguments(signature: Signature, values: Mapping[int, ValueModel], device: str, wants_grad: bool) -> Arguments:
    def make(leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            return _tensor(leaf, values, device, wants_grad)
        if isinstance(leaf, GeneratorSpec):
            return torch.Generator(device).manual_seed(leaf.seed)
        return torch.device(device) if isinstance(leaf, torch.device) else leaf

    args, kwargs = map_leaves(make, (signature.args, signature.kwargs))
    return args, kwargs


def _tensor(spec: TensorSpec, values: Mapping[int, ValueModel], device: str, wants_grad: bool) -> torch.Tensor:
    stride = spec.stride
    assert stride is not None, "checked before"
    tensor = torch.empty_strided(spec.shape, stride, dtype=spec.dtype, device=device)
    model = None if spec.values is None else values.get(spec.values)
    if model is not None and tensor.numel():
        generator = torch.Generator(device).manual_seed(torch.initial_seed())
        drawn = model.draw(spec.shape, spec.dtype, generator)
        # if elements share memory, write only one index of each dimension
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
        tensor[once].copy_(drawn[once])
    else:
        tensor.zero_()
    has_gradient = wants_grad and (spec.dtype.is_floating_point or spec.dtype.is_complex)
    return tensor.requires_grad_() if has_gradient else tensor
