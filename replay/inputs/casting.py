"""Arguments in another floating-point dtype than the recorded one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, tensors
from opgrip.traces.schema.records import Signature
from opgrip.traces.schema.tensor_specs import Compressed, Coo, Nested

CAST = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Dtypes that others can stand for; values of fewer bits mean something only by the scales that belong to them."""


def caster(tree: Any, dtype: torch.dtype) -> Callable[[Any], Any]:
    """What gives each argument of a call as it is where floating-point tensors have another dtype.

    A dtype among the arguments is changed where tensors of the call had it, or where the call has no such tensors. A
    number too large for the new dtype becomes the largest.

    Raises
    ------
    ValueError : for a dtype that is none of floating point
    Unsupported : where arguments see the same memory as of several dtypes
    """
    if not dtype.is_floating_point:
        raise ValueError(f"{dtype} is no floating-point dtype")
    memory = [piece for spec in tensors(tree) for piece in pieces(spec)]
    cast_dtypes = {piece.dtype for piece in memory} & CAST
    _check_shared(memory)
    most = torch.finfo(dtype).max

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, TensorSpec):
            return cast_spec(leaf, dtype)
        if isinstance(leaf, torch.dtype):
            return dtype if leaf in (cast_dtypes or CAST) else leaf
        if type(leaf) is float and math.isfinite(leaf):
            return min(max(leaf, -most), most)
        return leaf

    return cast


def cast_signature(signature: Signature, dtype: torch.dtype | None) -> Signature:
    """Return a call as it runs in another dtype, its results too; the same call where no tensor can be cast."""
    if dtype is None:
        return signature
    try:
        cast = caster((signature.args, dict(signature.kwargs)), dtype)
    except Unsupported:
        return signature
    recorded = (signature.args, dict(signature.kwargs))
    arguments = map_leaves(cast, recorded)
    if arguments == recorded:
        return signature
    args, kwargs = arguments
    return replace(signature, args=args, kwargs=kwargs, outputs=map_leaves(cast, signature.outputs))


def cast_spec(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    """A tensor, and what it is made of, in another dtype where it is of floating point."""
    if spec.dtype not in CAST:
        return spec
    made_of = spec.made_of
    match made_of:
        case Coo() | Compressed():
            made_of = replace(made_of, values=replace(made_of.values, dtype=dtype))
        case Nested():
            made_of = replace(made_of, buffer=replace(made_of.buffer, dtype=dtype))
    return replace(spec, dtype=dtype, made_of=made_of)


def pieces(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """The strided tensors whose memory a tensor lies in: itself, or its parts."""
    return spec.parts or (spec,)


def _check_shared(memory: list[TensorSpec]) -> None:
    dtypes: dict[int, set[torch.dtype]] = {}
    for piece in memory:
        if piece.storage is not None:
            dtypes.setdefault(piece.storage, set()).add(piece.dtype)
    if any(len(storage_dtypes) > 1 and storage_dtypes & CAST for storage_dtypes in dtypes.values()):
        raise Unsupported("arguments see the same memory as of several dtypes, so it cannot be of another")
