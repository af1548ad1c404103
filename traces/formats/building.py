"""Makes the records of a trace of calls that come one after the other, as files of other tools have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from opgrip.traces.io.foreign_files import Losses, formats
from opgrip.traces.schema.arguments import Opaque, encode
from opgrip.traces.schema.records import (
    OPERATOR,
    Calls,
    Context,
    End,
    Header,
    Record,
    Scope,
    Signature,
    Thread,
    Values,
)
from opgrip.traces.values import ValueModel, fit

BLOCK = 4096
"""Calls of a block."""
NO_TIMES = "durations: the file has none, so shares are by the number of calls"
NO_VALUES = "values of tensors: the file has none, so they are drawn as each operator needs them"
NO_GRADIENTS = (
    "requires_grad: the file does not say it of each tensor, so --backward makes all floating-point arguments require "
    "gradients"
)
NOT_RECORDED = Opaque("not recorded")


class RecordBuilder:
    """Numbers signatures, scopes and value models as they come, and makes blocks of calls.

    A reader of a format adds calls and passes on what is `ready`:

        builder = RecordBuilder("tritonbench", file.losses)
        for op, args, kwargs in calls_of(file):
            builder.add_call(op, args, kwargs)
            yield from builder.ready()
        yield from builder.end()

    Parameters
    ----------
    name : of the format
    losses : has what the reader passed over, for the last record
    facts : of the header: whatever the file says of versions, devices, the command and the time
    is_timed : whether the file has durations
    """

    def __init__(self, name: str, losses: Losses, facts: dict[str, Any] | None = None, is_timed: bool = False) -> None:
        self._losses = losses
        self._numbers: dict[str, dict[str, int]] = {}
        self._blocks: dict[int, Calls] = {}
        self._next_ns = 0
        self._calls = 0
        self._newest = -1
        fields = {"converted_from": name, "timed": is_timed, "defaults": list(losses.defaults)}
        self._records: list[Record] = [Header({**fields, **(facts or {})})]

    def ready(self) -> Iterator[Record]:
        """The records that were made since the last time."""
        records, self._records = self._records, []
        yield from records

    def add_values(self, model: ValueModel) -> int:
        """The number of a value model, for `TensorSpec.values`."""
        return self._number("values", repr(model), lambda number: Values(number, model))

    def add_context(self, settings: dict[str, Any]) -> int:
        """The number of settings that calls ran under, for `Scope.context`."""
        return self._number("context", json.dumps(settings, sort_keys=True), lambda number: Context(number, settings))

    def add_scope(self, scope: Scope) -> int:
        """The number of a scope, for `Scope.forward`; its own number is not looked at."""
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
    ) -> int:
        """Add a call, or several of one signature; the number of the signature.

        Parameters
        ----------
        op : with its overload, `aten.add.Tensor`
        args, kwargs, outputs : trees of values and `TensorSpec`
        scope : where it came from; its number is not looked at
        start_ns : since the first call; None where it is not known: then after the call before
        storages : numbers of the memory of its tensors, those of arguments first; empty where they are not known
        device_ns : how long it kept an accelerator busy
        """
        signature = self._signature(kind, op, tuple(args), kwargs or {}, outputs)
        place = self.add_scope(scope or Scope(0, "", "", "forward"))
        number = self._number("thread", thread, lambda number: Thread(number, thread))
        for _ in range(count):
            block = self._blocks.setdefault(number, Calls(number, [], [], [], []))
            begun_ns = self._next_ns if start_ns is None else start_ns
            self._next_ns = max(self._next_ns, begun_ns + max(duration_ns, 1))
            block.signature.append(signature)
            block.scope.append(place)
            block.start_ns.append(begun_ns)
            block.duration_ns.append(duration_ns)
            block.device_ns.append(device_ns)
            block.tensors.append(len(storages))
            block.storages.extend(storages)
            self._calls += 1
            if len(block.signature) >= BLOCK:
                self._end_block(number)
        return signature

    def end(self) -> Iterator[Record]:
        """The remaining records."""
        for number in list(self._blocks):
            self._end_block(number)
        totals = (self._calls, len(self._numbers.get("signature", {})), self._next_ns)
        self._records.append(End(*totals, dropped=self._losses.dropped()))
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

    def _signature(self, kind: str, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> int:
        form = json.dumps([kind, op, [encode(arg) for arg in args], {name: encode(kwargs[name]) for name in kwargs}])
        return self._number("signature", form, lambda number: Signature(number, kind, op, args, kwargs, outputs))

    def _number(self, what: str, key: str, make: Any) -> int:
        """The number of what has this key; where it is new, its record is made."""
        numbers = self._numbers.setdefault(what, {})
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(numbers)
            self._records.append(make(number))
        return number


def says_gradients(header: Mapping[str, Any]) -> bool:
    """Return True if the source of a trace says which tensors require gradients, as a capture does."""
    if any(not says_gradients(process) for process in header.get("processes") or () if isinstance(process, Mapping)):
        return False
    if "converted_from" not in header:
        return True
    format_ = formats.get(str(header["converted_from"]))
    return format_ is not None and NO_GRADIENTS not in format_.defaults


def fit_values(tensor: torch.Tensor) -> ValueModel | None:
    """The model of values that a file has; None for an empty tensor.

    It is fitted in this thread alone: a process whose operators ran in several hangs in its forks, which replay calls.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return fit(tensor)
    finally:
        torch.set_num_threads(threads)
