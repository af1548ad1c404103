"""Builder of trace records from calls in order, for readers of other tools' files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from opgrip.traces.io.foreign_files import Losses, formats
from opgrip.traces.schema.arguments import Opaque, TensorSpec, encode, map_leaves, tensors
from opgrip.traces.schema.json_values import device_name
from opgrip.traces.schema.records import (
    NO_STORAGE,
    OPERATOR,
    Calls,
    End,
    Header,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
    listed,
)
from opgrip.traces.schema.tensor_specs import DTYPES, contiguous
from opgrip.traces.values import ValueModel, fit

if TYPE_CHECKING:
    import pandas as pd

    from opgrip.traces.table.trace import Trace

T = TypeVar("T")


def split(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
) -> tuple[tuple[Any, ...], dict[str, Any], Any, list[int]]:
    """Return a call's arguments and results as in a signature, and the storage numbers of all their tensors."""
    argument_storages = [_number(spec) for spec in tensors([args, kwargs])]
    result_storages = [_number(spec) for spec in tensors(outputs)]
    counts = Counter(number for number in argument_storages if number != NO_STORAGE)
    shared = [number for number in counts if counts[number] > 1]
    groups = {number: index for index, number in enumerate(shared)}

    def grouped(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf
        return replace(leaf, storage=None if leaf.storage is None else groups.get(leaf.storage))

    def plain(leaf: Any) -> Any:
        return replace(leaf, storage=None) if isinstance(leaf, TensorSpec) else leaf

    return (
        map_leaves(grouped, args),
        map_leaves(grouped, kwargs),
        map_leaves(plain, outputs),
        [*argument_storages, *result_storages],
    )


def _number(spec: TensorSpec) -> int:
    return NO_STORAGE if spec.storage is None else spec.storage


MOST_SIZE = 1 << 62  # maximum of sizes, strides, offsets, and the number of elements of a tensor


def tensor_of(
    shape: Any, dtype: Any, stride: Any = None, device: Any = "cpu", offset: Any = 0, requires_grad: Any = False
) -> TensorSpec:
    """Return the `TensorSpec` for values from a file. Raises `ValueError` if the values are not valid."""
    sizes = tuple(shape) if isinstance(shape, list | tuple) else None
    kind = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if sizes is None:
        raise ValueError(f"the shape of a tensor is not a list: {str(shape)[:40]}")
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"unknown dtype: {str(dtype)[:40]}")
    if not all(map(_is_size, sizes)):
        raise ValueError(f"the shape of a tensor is not a list of sizes: {str(shape)[:40]}")
    strides = contiguous(sizes) if stride is None else tuple(stride) if isinstance(stride, list | tuple) else ()
    if len(strides) != len(sizes) or not all(map(_is_size, (*strides, offset, math.prod(sizes)))):
        raise ValueError(
            f"a tensor of shape {str(shape)[:40]} is too large, or its strides or offset do not fit its shape"
        )
    with_gradients = requires_grad is True and (kind.is_floating_point or kind.is_complex)
    return TensorSpec(sizes, strides, kind, device_name(device), offset=offset, requires_grad=with_gradients)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_SIZE


BLOCK = 4096  # number of calls per block
NO_TIMES = "durations: the file has none, so shares are by the number of calls"
NO_DEVICE = "devices of tensors: the file has none, so they are on the processor"
NO_VALUES = "values of tensors: the file has none, so they are generated to suit each operator"
NO_GRADIENTS = (
    "requires_grad: the file does not record it per tensor, so --backward makes all floating-point arguments require "
    "gradients"
)
NOT_RECORDED = Opaque("not recorded")


class RecordBuilder:
    """Builds the records of a trace from calls; it numbers signatures, scopes and value models.

    builder = RecordBuilder("tritonbench", file.losses)
    for op, args, kwargs in calls_of(file):
        builder.add_call(op, args, kwargs)
        yield from builder.ready()
    yield from builder.end()
    """

    def __init__(self, name: str, losses: Losses, facts: dict[str, Any] | None = None, is_timed: bool = False) -> None:
        self._losses = losses
        self._numbers: dict[str, dict[str, int]] = {}
        self._blocks: dict[int, Calls] = {}
        self._next_ns = 0
        self._calls = 0
        self._newest = -1
        fields = {"converted_from": name, "timed": is_timed, "defaults": list(losses.defaults)}
        if losses.doubts:
            fields["doubts"] = list(losses.doubts)
        self._records: list[Record] = [Header({**fields, **(facts or {})})]

    def ready(self) -> Iterator[Record]:
        records, self._records = self._records, []
        yield from records

    def add_values(self, model: ValueModel) -> int:
        return self._number("values", repr(model), lambda number: Values(number, model))

    def add_scope(self, scope: Scope) -> int:
        unnumbered = replace(scope, number=0)
        return self._number("scope", repr(unnumbered), lambda number: replace(unnumbered, number=number))

    def add_call(
        self,
        op: str,
        args: Iterable[Any],
        kwargs: dict[str, Any] | None = None,
        outputs: Any = NOT_RECORDED,
        *,
        count: int = 1,
        kind: str = OPERATOR,
        scope: Scope | None = None,
        thread: str = "main",
        start_ns: int | None = None,
        duration_ns: int = 0,
        storages: Sequence[int] = (),
        device_ns: int = -1,
        number: int | None = None,
    ) -> int:
        """Add `count` calls of one signature, and return the number of the signature.

        op : operator with its overload, such as `aten.add.Tensor`
        start_ns : time since the first call; None: the call starts after the previous one
        storages : storage numbers of its tensors, arguments first; empty if unknown
        device_ns : time that the call kept an accelerator busy; -1 for a call on the host only, or if unknown
        number : number of the signature if it is new; None for the next one
        """
        args, kwargs = tuple(args), kwargs or {}
        form = json.dumps([kind, op, [encode(arg) for arg in args], {name: encode(kwargs[name]) for name in kwargs}])
        signature = self._number("signature", form, lambda new: Signature(new, kind, op, args, kwargs, outputs), number)
        scope_number = self.add_scope(scope or Scope(0, "", "", "forward"))
        in_thread = self._number("thread", thread, lambda number: Thread(number, thread))
        for _ in range(count):
            block = self._blocks.setdefault(in_thread, Calls(in_thread, [], [], [], []))
            begun_ns = self._next_ns if start_ns is None else start_ns
            self._next_ns = max(self._next_ns, begun_ns + max(duration_ns, 1))
            block.signature.append(signature)
            block.scope.append(scope_number)
            block.start_ns.append(begun_ns)
            block.duration_ns.append(duration_ns)
            block.device_ns.append(device_ns)
            block.tensors.append(len(storages))
            block.storages.extend(storages)
            self._calls += 1
            if len(block.signature) >= BLOCK:
                self._end_block(in_thread)
        return signature

    @contextmanager
    def skipping(self, op: str, count: int = 1) -> Iterator[None]:
        """Report calls as skipped if they cannot be converted, which raises `ValueError` with the reason."""
        try:
            yield
        except ValueError as error:
            self._losses.skip(op, str(error), count)

    def end(self) -> Iterator[Record]:
        for number in list(self._blocks):
            self._end_block(number)
        totals = (self._calls, len(self._numbers.get("signature", {})), self._next_ns)
        self._records.append(End(*totals, dropped=listed(self._losses.skipped)))
        yield from self.ready()

    def _end_block(self, number: int) -> None:
        block = self._blocks.pop(number)
        on_device = any(duration >= 0 for duration in block.device_ns)
        with_storages = any(block.tensors)
        block = replace(
            block,
            device_ns=block.device_ns if on_device else [],
            tensors=block.tensors if with_storages else [],
            newest=self._newest,
        )
        self._newest = max([self._newest, *block.storages])
        self._records.append(block)

    def _number(self, what: str, key: str, make: Any, unused: int | None = None) -> int:
        numbers = self._numbers.setdefault(what, {})
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(numbers) if unused is None else unused
            self._records.append(make(number))
        return number


def converted(
    trace: Trace, losses: Losses, convert: Callable[[Signature], T]
) -> Iterator[tuple[Signature, T, pd.DataFrame]]:
    """Yield each signature of a trace, its converted form, and its calls; signatures without one are reported."""
    signatures = {item.number: item for item in trace.signatures}
    for number, calls in trace.own_calls.groupby("signature", sort=True):
        signature = signatures[int(number)]  # type: ignore[arg-type]
        try:
            form = convert(signature)
        except ValueError as error:
            losses.skip(signature.op, str(error), len(calls))
            continue
        yield signature, form, calls


def says_gradients(header: Mapping[str, Any]) -> bool:
    """Return True if a trace with this header records which tensors require gradients."""
    if any(not says_gradients(process) for process in header.get("processes") or () if isinstance(process, Mapping)):
        return False
    if "converted_from" not in header:
        return True
    format_ = formats.get(str(header["converted_from"]))
    return format_ is not None and NO_GRADIENTS not in format_.defaults


def fit_values(tensor: torch.Tensor) -> ValueModel | None:
    # a replay forks, and forks of a process hang if operators ran in several of its threads
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return fit(tensor)
    finally:
        torch.set_num_threads(threads)
