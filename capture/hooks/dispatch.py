"""The dispatch mode, which sees every operator that the dispatcher runs in its thread, below autograd and autocast.

`__torch_dispatch__` runs for every call of a program and is therefore written for speed.
`benchmarks/capture_overhead.py` measures it, and docs/capture.md lists the cost of each part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import get_ident
from time import perf_counter_ns
from types import FunctionType
from typing import Any, cast

import torch
from torch import is_grad_enabled

from opgrip.capture.hooks.call_recording import NOTHING, CallRecording, Storages
from opgrip.capture.recording.storages import SWEEP, SWEEP_BYTES
from opgrip.capture.recording.thread_mode import UNPAIRED
from opgrip.capture.signatures.predictions import CAREFUL, LISTED, ONE, SEVERAL, TWO, CallNode, sharing
from opgrip.capture.torch_compat.compiler_private import hide_from_compiler
from opgrip.capture.torch_compat.torch_private import (
    current_autograd_node,
    is_faking,
    is_made_of_tensors,
    pin,
    sequence_number,
    storage_address,
    unpin,
)
from opgrip.errors import is_from_program

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# types in a tuple of results that is recorded without a search for tensors in it
RESULTS = frozenset({torch.Tensor, type(None)})


class RecordingMode(CallRecording):
    """Dispatch mode that records the calls of one thread and runs every call unchanged."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # returns True if torch should wrap the handler in its guard
        return not cls._hidden

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.idle or (types and not PLAIN.issuperset(types)):
            return self._pass_by(func, types, args, kwargs or {})
        autograd_node = current_autograd_node()
        if autograd_node is not None and get_ident() != self.ident:
            # the autograd engine's threads inherit the mode of the thread that ran the forward pass
            return self.recorder.threads.of_engine().__torch_dispatch__(func, types, args, kwargs)
        node: CallNode | None = None
        argument_storages: Storages | None = None
        try:
            grad = is_grad_enabled()
            if autograd_node is None:
                if self._in_backward:
                    self._leave_backward()
                # autograd makes no node while gradients are off
                sequence = sequence_number() if grad else UNPAIRED
            else:
                sequence = self._enter_backward(autograd_node)
            node = self.last.after
            if (
                node.func is func
                and node.grad is grad
                and (node.check_both(args, kwargs) if kwargs else node.check(args))
            ):
                layout, number = node.layout, self._numbers.get
                if layout == ONE:
                    memory = number(storage_address(args[0]))
                    if memory is not None:
                        argument_storages = (memory,)
                elif layout == TWO:
                    memory, other = number(storage_address(args[0])), number(storage_address(args[1]))
                    if memory is not None and other is not None and (memory != other) is (node.sharing is None):
                        argument_storages = (memory, other)
                else:
                    argument_storages = self._match_storages(node, args, kwargs)
            if argument_storages is None:
                node, argument_storages = self._find(func, args, kwargs or NOTHING)
            self.last = node
        except Exception as error:
            node, argument_storages = self._find_after(error, func, args, kwargs or NOTHING)
        if node is None or argument_storages is None:
            return func(*args, **(kwargs or {}))
        self.started = start = perf_counter_ns()
        if self._ahead and not is_faking():
            self.recorder.write_ahead_of(node.number)
        try:
            result = node.op(*args, **kwargs) if kwargs else node.op(*args)
        except BaseException as error:
            self._keep(node, argument_storages, start, perf_counter_ns(), sequence, None, error)
            raise
        try:
            end = perf_counter_ns()
            if node.layout and type(result) is torch.Tensor:
                alias = node.alias
                if alias >= 0:
                    result_storage = argument_storages[alias]
                else:
                    storage = result.untyped_storage()
                    address, numbers = pin(storage), self._numbers
                    if address in numbers:
                        unpin(address)
                    else:
                        new_number = next(self._new_number)
                        if address in numbers:
                            # another thread was faster
                            unpin(address)
                        else:
                            numbers[address] = new_number
                            self._young.append(address)
                            if result.is_cpu:
                                self._pinned_bytes += storage.nbytes()
                            if len(self._young) > SWEEP or self._pinned_bytes > SWEEP_BYTES:
                                self._sweep()
                    result_storage = numbers[address]
                # This and returning are one step for an interrupt of the program: the call is either recorded or
                # counted as lost.
                rows = self.rows
                rows += (node.pair, start, end, sequence, *argument_storages, result_storage)
            elif node.layout and type(result) is tuple and RESULTS.issuperset(map(type, result)):
                result_storages = self._storages.numbers_of(result)
                tensors = len(argument_storages) + len(result_storages)
                pair = self.recorder.scopes.pair(node.number, node.scope, tensors)
                rows = self.rows
                rows += (pair, start, end, sequence, *argument_storages, *result_storages)
            else:
                self._keep(node, argument_storages, start, end, sequence, result, None)
        except BaseException as error:
            if isinstance(error, NotImplementedError) and not is_from_program(error):
                # a sparse result has no storage
                node.layout = CAREFUL
                self._keep(node, argument_storages, start, end, sequence, result, None)
            else:
                self.recorder.lost.lose(str(func), error)
        return result

    _hidden = hide_from_compiler(cast(FunctionType, __torch_dispatch__))

    def _pass_by(self, func: Any, types: Sequence[type], args: Any, kwargs: Any) -> Any:
        if self.idle:
            return func(*args, **kwargs)
        self.recorder.lost.pass_by(str(func), types)
        if all(kind in PLAIN or is_made_of_tensors(kind) for kind in types):
            # the operators that it calls are dispatched here
            return NotImplemented
        # for example, tensors that act as placeholders while a program is traced
        return func(*args, **kwargs)

    def _match_storages(self, node: CallNode, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Storages | None:
        number = self._numbers.get
        if node.layout == SEVERAL:
            numbers = [number(storage_address(args[place])) for place in node.places]
        elif node.layout == LISTED:
            numbers = [number(storage_address(item)) for item in args[0]]
        else:
            numbers = list(self.storages_in(args, kwargs or NOTHING))
        if None in numbers:
            return None
        alone = len(set(numbers)) == len(numbers)
        storages = cast(Storages, tuple(numbers))
        return (
            storages if (alone and node.sharing is None) or (not alone and sharing(storages) == node.sharing) else None
        )

    def _sweep(self) -> None:
        began, self._pinned_bytes = perf_counter_ns(), 0
        self._storages.sweep()
        if self.recorder.kernels is not None:
            self.recorder.kernels.renew(self.recorder.graphs)
        self._spent(began)
