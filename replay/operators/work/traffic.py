"""Bytes that a call has to move at least between memory and what computes."""

from __future__ import annotations

from math import prod

import torch

from opgrip.replay.operators.work.calls import Call, operators, tensors_among

OVERWRITES = operators("copy fill zero normal uniform bernoulli exponential random log_normal cauchy geometric")
"""Write all of their first argument in place, and read nothing of it."""
GATHERS = {
    **dict.fromkeys(("aten.index", "aten._unsafe_index", "aten.index_select", "aten.gather", "aten.take"), "self"),
    **dict.fromkeys(("aten.masked_select", "aten.upsample_nearest1d", "aten.upsample_nearest2d"), "self"),
    **dict.fromkeys(("aten.embedding", "aten.quantized_embedding"), "weight"),
    "mmcv._ext:roi_align_forward": "0",
}
"""Read of this argument no more elements than they give, as if no place were asked for twice."""
SCATTERS = {
    **dict.fromkeys(("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put"), "values"),
    **dict.fromkeys(("aten.scatter", "aten.scatter_add", "aten.scatter_reduce"), "index"),
    **dict.fromkeys(("aten.index_add", "aten.index_copy"), "source"),
}
"""In place, they write of their first argument no more elements than this argument has."""
ADDS = frozenset({"aten.scatter_add", "aten.scatter_reduce", "aten.index_add"})
"""Of those, the ones that read what they write; `index_put` does so where it accumulates."""
UNWRITTEN = operators("empty empty_like empty_strided new_empty new_empty_strided")
"""Give memory as it is."""


def bytes_moved(call: Call) -> int | None:
    """Distinct bytes that a call reads, and bytes that it writes; None where a tensor is not strided.

    Elements that strides repeat count once. Results that lie in an argument's memory are views, or what was written in
    place, and are not counted again: a call that only makes views moves nothing. What is changed in place counts
    twice, being read and written.
    """
    if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in (*call.ins, *call.outs)):
        return None
    own = {_memory(tensor) for tensor in call.ins}
    fresh = [tensor for tensor in call.outs if _memory(tensor) not in own]
    written = frozenset() if call.schema is None else call.schema.written
    if call.outs and not fresh and not written:
        return 0
    fresh_bytes = 0 if call.name in UNWRITTEN else sum(map(distinct_bytes, fresh))
    return fresh_bytes + sum(_moved_of(call, name, tensor, name in written) for name, tensor in _arguments(call))


def distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a strided tensor, those that several elements share counted once."""
    pairs = [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step or not size]
    elements = prod(size for size, _ in pairs)
    extent = 1 + sum((size - 1) * step for size, step in pairs) if elements else 0
    # windows that overlap have more elements than memory
    return min(elements, extent) * tensor.element_size()


def _arguments(call: Call) -> list[tuple[str, torch.Tensor]]:
    """Tensors among the arguments by the names of these, each tensor once."""
    keys: set[tuple[object, ...]] = set()
    arguments = []
    for name, value in call.values.items():
        for tensor in tensors_among(value):
            key = (_memory(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            if key not in keys:
                keys.add(key)
                arguments.append((name, tensor))
    return arguments


def _moved_of(call: Call, name: str, tensor: torch.Tensor, written: bool) -> int:
    whole = distinct_bytes(tensor)
    if written:
        if call.name in OVERWRITES or (call.schema is not None and name in call.schema.outs):
            return whole
        if call.name in SCATTERS:
            values = tensors_among(call.values.get(SCATTERS[call.name]))
            touched = min(whole, max((value.numel() for value in values), default=0) * tensor.element_size())
            return touched * (2 if call.name in ADDS or call.values.get("accumulate") else 1)
        return 2 * whole
    if GATHERS.get(call.name) == name:
        result_elements = sum(out.numel() for out in call.outs) or _elements_of_results(call)
        return min(whole, result_elements * tensor.element_size())
    if _reads_nothing(call.name, name):
        return 0
    return whole


def _elements_of_results(call: Call) -> int:
    """Of a function that writes into arguments and gives nothing: the result is the largest after the gathered one."""
    source = GATHERS[call.name]
    others = [tensor.numel() for name, tensor in _arguments(call) if name != source]
    return max(others, default=0)


def _reads_nothing(operator: str, argument: str) -> bool:
    """Whether an operator looks at no more than this argument's metadata."""
    name = operator.removeprefix("aten.")
    return argument == "self" and (name.endswith("_like") or name.startswith("new_"))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
