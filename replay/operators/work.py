"""The work of a call: floating-point operations, bytes to read and write, and number of operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from opgrip.replay.operators.formulas import OperatorCall, call_of, flops_of, operators, tensors_among
from opgrip.traces.schema.tensor_specs import plain_name

# operators that overwrite their first argument completely without reading it
OVERWRITES = operators("copy fill zero normal uniform bernoulli exponential random log_normal cauchy geometric")
# for operators that gather elements, the argument of which they read no more elements than they return
GATHERS = {
    **dict.fromkeys(("aten.index", "aten._unsafe_index", "aten.index_select", "aten.gather", "aten.take"), "self"),
    **dict.fromkeys(("aten.masked_select", "aten.upsample_nearest1d", "aten.upsample_nearest2d"), "self"),
    **dict.fromkeys(("aten.embedding", "aten.quantized_embedding"), "weight"),
    "mmcv._ext:roi_align_forward": "0",
}
# for operators that scatter elements, the argument whose number of elements limits the number of elements that they
# write
SCATTERS = {
    **dict.fromkeys(("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put"), "values"),
    **dict.fromkeys(("aten.scatter", "aten.scatter_add", "aten.scatter_reduce"), "index"),
    **dict.fromkeys(("aten.index_add", "aten.index_copy"), "source"),
}
# operators in `SCATTERS` that also read the elements that they write
ADDS = frozenset({"aten.scatter_add", "aten.scatter_reduce", "aten.index_add"})
UNWRITTEN = operators("empty empty_like empty_strided new_empty new_empty_strided")


def bytes_moved(call: OperatorCall) -> int | None:
    """Return the number of distinct bytes that a call has to read and write; None if a tensor is not strided.

    Elements that a stride of 0 repeats count once, and results in an argument's storage do not count again. Elements
    that are changed in place count twice, as read and as written.
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
    pairs = [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step or not size]
    elements = prod(size for size, _ in pairs)
    extent = 1 + sum((size - 1) * step for size, step in pairs) if elements else 0
    # overlapping windows have more elements than their memory
    return min(elements, extent) * tensor.element_size()


def _arguments(call: OperatorCall) -> list[tuple[str, torch.Tensor]]:
    keys: set[tuple[object, ...]] = set()
    arguments = []
    for name, value in call.values.items():
        for tensor in tensors_among(value):
            key = (_memory(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            if key not in keys:
                keys.add(key)
                arguments.append((name, tensor))
    return arguments


def _moved_of(call: OperatorCall, name: str, tensor: torch.Tensor, written: bool) -> int:
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


def _elements_of_results(call: OperatorCall) -> int:
    source = GATHERS[call.name]
    others = [tensor.numel() for name, tensor in _arguments(call) if name != source]
    return max(others, default=0)


def _reads_nothing(operator: str, argument: str) -> bool:
    name = operator.removeprefix("aten.")
    return argument == "self" and (name.endswith("_like") or name.startswith("new_"))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


NARROW_PRODUCTS = ("aten._scaled_mm", "aten._int_mm")  # 8-bit products with wider results


@dataclass(frozen=True, slots=True)
class Work:
    """The least work that a call requires.

    flops : number of floating-point operations; None if no formula covers the call
    bytes : number of bytes to read and write; None if unknown
    dtype : name of the dtype in which it computes; None if unknown
    operators : number of operators that the dispatcher runs
    """

    flops: int | None
    bytes: int | None
    dtype: str | None
    operators: int


def work_of(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Work:
    return _work(call_of(function, name, args, kwargs, result))


def counted(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = True) -> Work:
    """Run a function once and return the work of all operators that it calls.

    whole : True to count only the bytes of the function's arguments and results, as for a single kernel
    """
    tally = _Tally()
    with tally:
        result = function(*args, **kwargs)
    size = bytes_moved(call_of(function, "", args, kwargs, result)) if whole else tally.bytes
    dtype = max(tally.by_dtype, key=lambda name: tally.by_dtype[name], default=None)
    return Work(tally.flops if tally.has_flops else None, size, dtype, tally.operators)


class _Tally(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = self.operators = 0
        self.has_flops = False
        self.by_dtype: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        work = work_of(function, str(function), tuple(args), kwargs or {}, result)
        self.operators += 1
        self.has_flops |= work.flops is not None
        self.flops += work.flops or 0
        self.bytes += work.bytes or 0
        if work.dtype is not None:
            self.by_dtype[work.dtype] += work.flops or 0
        return result


def _work(call: OperatorCall) -> Work:
    return Work(flops_of(call), bytes_moved(call), _dtype(call), 1)


def _dtype(call: OperatorCall) -> str | None:
    if call.name in NARROW_PRODUCTS:
        return plain_name(call.values["self"].dtype)
    tensors: list[torch.Tensor] = sorted(
        (*call.ins, *call.outs), key=lambda tensor: (tensor.is_floating_point() or tensor.is_complex(), tensor.numel())
    )
    return plain_name(tensors[-1].dtype) if tensors else None
