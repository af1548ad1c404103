"""Fitting and numbering of value models for arguments of calls, on the CPU or on copies from an accelerator."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opgrip.capture.program.accelerators import (
    GraphCaptures,
    accelerators,
    in_stream,
    is_capturing,
    new_stream,
    on_device,
    record_on,
)
from opgrip.capture.signatures.full_values import FullValues
from opgrip.capture.signatures.layouts import FitValues
from opgrip.capture.signatures.signatures import describe_call
from opgrip.capture.torch_compat.torch_private import without_functions, without_modes
from opgrip.errors import one_line, raise_if_from_program
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, numbers_of, tensors, with_numbers
from opgrip.traces.schema.records import NO_COPIES_IN_GRAPHS, NO_SPACE, Record, Signature, Values
from opgrip.traces.values import ValueModel, depends_on_values, fit_argument, has_needs, is_refined, refine_model
from opgrip.traces.values.model import sample

# maximum number of elements of a tensor that is copied completely; larger tensors are sampled. For each quarter of
# `MOST_BYTES` in use, samples become four times smaller.
MOST_ELEMENTS = 1 << 18
# maximum number of bytes of all copies on devices, and of copies on the host without a fitted value model; if there is
# no space for a tensor, its values are read at a later call
MOST_BYTES = 256 << 20
# maximum number of bytes, and of copies, that are transferred to the host together
TRANSFER_BYTES, TRANSFER_COPIES = 16 << 20, 256

EMPTY = torch.empty(0)


@dataclass(slots=True)
class Waiting:
    number: int
    op: str
    argument: str
    copy: torch.Tensor
    event: Any
    outputs: Any = None


def is_deferred(tensor: torch.Tensor) -> bool:
    return tensor.device.type in accelerators()


class Deferred:
    """Copies of device tensors, or of parts of large ones, that wait for their transfer to the host."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._arrived: deque[tuple[torch.Tensor, Waiting]] = deque()
        self._bytes = self._host_bytes = 0
        self._streams: dict[torch.device, Any] = {}

    def add(self, number: int, op: str, argument: str, tensor: torch.Tensor) -> str | None:
        """Copy a tensor, or a part of it, on its device; return None, or the reason why it was not copied."""
        if is_capturing(tensor.device.type):
            # a copy would become part of the graph
            return NO_COPIES_IN_GRAPHS
        quarters = 4 * self._bytes // MOST_BYTES
        part = sample(tensor.detach(), MOST_ELEMENTS >> 2 * quarters)
        if self._bytes + part.nbytes > MOST_BYTES:
            return NO_SPACE
        self._bytes += part.nbytes
        # otherwise the stride of a single element is kept, with which it cannot be seen as bytes
        copy = part.clone(memory_format=torch.contiguous_format)
        self._waiting.append(Waiting(number, op, argument, copy, record_on(tensor.device)))
        return None

    def set_outputs(self, number: int, outputs: Any) -> None:
        for item in reversed(self._waiting):
            if item.number == number:
                item.outputs = outputs
                return

    def ready(self, graphs: GraphCaptures, wait: bool) -> Iterator[tuple[torch.Tensor, Waiting]]:
        while True:
            # first empty the devices' memory
            while self._host_bytes < MOST_BYTES and self._transfer(graphs, wait):
                pass
            if not self._arrived:
                return
            values, item = self._arrived.popleft()
            self._host_bytes -= values.nbytes
            yield values, item

    def forget(self) -> None:
        self._waiting.clear()
        self._arrived.clear()
        self._bytes = self._host_bytes = 0

    def _transfer(self, graphs: GraphCaptures, wait: bool) -> bool:
        if not self._waiting:
            return False
        device = self._waiting[0].copy.device
        with graphs.question() as may_ask, on_device(device):
            batch = self._take(device, wait) if may_ask else []
            if not batch:
                return False
            arrived = self._to_host(device, batch)
        for item in batch:
            item.copy = EMPTY
        self._host_bytes += sum(values.nbytes for values in arrived)
        self._arrived.extend(zip(arrived, batch, strict=True))
        return True

    def _take(self, device: torch.device, wait: bool) -> list[Waiting]:
        batch: list[Waiting] = []
        size = 0
        while self._waiting and len(batch) < TRANSFER_COPIES:
            item = self._waiting[0]
            size += item.copy.nbytes
            if item.copy.device != device or (batch and size > TRANSFER_BYTES) or not (wait or item.event.query()):
                break
            batch.append(self._waiting.popleft())
            self._bytes -= item.copy.nbytes
        return batch

    def _to_host(self, device: torch.device, batch: Sequence[Waiting]) -> list[torch.Tensor]:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = new_stream(device)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, item in enumerate(batch):
            by_dtype.setdefault(item.copy.dtype, []).append(place)
        values: dict[int, torch.Tensor] = {}
        with without_modes(), without_functions(), in_stream(stream), torch.no_grad():
            for item in batch:
                item.event.wait(stream)
            # together, because a transfer costs as much as many small copies
            for dtype, places in by_dtype.items():
                copies = [batch[place].copy.resolve_conj().resolve_neg() for place in places]
                flat = torch.cat([copy.reshape(-1).view(torch.uint8) for copy in copies]).cpu()
                sizes = [copy.nbytes for copy in copies]
                for place, copy, part in zip(places, copies, flat.split(sizes), strict=True):
                    values[place] = part.view(dtype).view(copy.shape)
        # the transfers have ended, so the memory of the copies may be used again in any stream
        return [values[place] for place in range(len(batch))]


@dataclass(frozen=True, slots=True)
class _Fitted:
    model: ValueModel | None
    key: str | None = None


class Fitter:
    """Fits value models to the arguments of calls, and numbers the models."""

    def __init__(
        self,
        pend: Callable[[Record], None],
        next_number: Callable[[], int],
        without_values: Counter[tuple[str, str]] | None = None,
        full: FullValues | None = None,
    ) -> None:
        self.full = full
        self.without_values: Counter[tuple[str, str]] = Counter() if without_values is None else without_values
        self._pend = pend
        self._numbers: dict[str, int] = {}
        self._next_number = next_number
        self._fitted: dict[int, _Fitted] = {}
        self._alike: dict[Hashable, list[int | None]] = {}
        self._deferred = Deferred()
        self._unread: dict[int, tuple[str, str]] = {}

    def describe_again(
        self, name: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named, op = _names(name), str(name)
        return describe_call(args, kwargs, lambda argument: lambda tensor: self.fit(op, named(argument), tensor))

    def describe(
        self, name: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Hashable]:
        described, inputs = _describe_by_index(args, kwargs)
        op, named = str(name), _names(name)
        alike: Hashable = (op, tuple(tensors(described)))
        if any(has_needs(op, named(argument), tensor.dtype) for argument, tensor in inputs):
            # an index must be within a dimension that depends on another argument
            alike = (op, len(self._alike))
        # full values belong to this call only
        numbers = None if self.full is not None else self._alike.get(alike)
        if numbers is None:
            numbers = self._alike[alike] = [
                self.fit(op, named(argument), tensor, reads_again=True) for argument, tensor in inputs
            ]
        indices = numbers_of(described)
        described = with_numbers(described, [None if index is None else numbers[index] for index in indices])
        return *described, alike

    def refine_by_outputs(self, signature: Signature, name: Hashable) -> Signature:
        if not is_refined(signature.op):
            return signature

        def refine_tree(argument: str, tree: Any) -> Any:
            def refine_leaf(leaf: Any) -> Any:
                number = leaf.values if isinstance(leaf, TensorSpec) else None
                return leaf if number is None else replace(leaf, values=self._refine_model(number, signature, argument))

            return map_leaves(refine_leaf, tree)

        named = _names(name)
        args = tuple(refine_tree(named(place), tree) for place, tree in enumerate(signature.args))
        kwargs = {keyword: refine_tree(named(keyword), tree) for keyword, tree in signature.kwargs.items()}
        return replace(signature, args=args, kwargs=kwargs)

    def forget(self) -> None:
        self._numbers.clear()
        self._alike.clear()

    def prune(self, numbers: set[int]) -> None:
        self._fitted = {number: fitted for number, fitted in self._fitted.items() if number in numbers}

    def fit_deferred(self, graphs: GraphCaptures, wait: bool = False) -> Iterator[None]:
        """Fit models to the device tensors whose values have arrived, and yield after each tensor."""
        for values, item in self._deferred.ready(graphs, wait):
            model = self._model(item.op, item.argument, values)
            if model is not None:
                model = model if item.outputs is None else refine_model(item.op, item.argument, model, item.outputs)
                self._pend(Values(item.number, model))
            yield

    def forget_deferred(self) -> None:
        self._deferred.forget()

    def is_unread(self, numbers: Iterable[int | None]) -> bool:
        return bool(self._unread) and any(number in self._unread for number in numbers)

    def read_again(
        self, name: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Sequence[int | None]
    ) -> Callable[[Any], None]:
        op, named = str(name), _names(name)
        read: list[int] = []
        described, inputs = _describe_by_index(args, kwargs)
        for number, index in zip(numbers, numbers_of(described), strict=True):
            if number is None or index is None or number not in self._unread:
                continue
            argument, tensor = inputs[index]
            if self._deferred.add(number, op, named(argument), tensor) is None:
                lost = self._unread.pop(number)
                self.without_values -= Counter([lost])
                read.append(number)

        def set_outputs(outputs: Any) -> None:
            for number in read:
                self._deferred.set_outputs(number, outputs)

        return set_outputs

    def fit(self, op: str, argument: str, tensor: torch.Tensor, reads_again: bool = False) -> int | None:
        if is_deferred(tensor):
            if tensor.numel() == 0:
                return None
            number = self._next_number()
            reason = self._deferred.add(number, op, argument, tensor)
            if reason is not None:
                self.without_values[op, reason] += 1
                if not reads_again:
                    return None
                self._unread[number] = op, reason
            self._fitted[number] = _Fitted(None)
            return number
        model = self._model(op, argument, tensor)
        if model is None:
            return None
        key = None if self.full is None else self.full.keep(tensor, op, self.without_values)
        return self._number(_Fitted(model, key))

    def _model(self, op: str, argument: str, tensor: torch.Tensor) -> ValueModel | None:
        try:
            return fit_argument(op, argument, tensor)
        except Exception as error:
            raise_if_from_program(error)
            self.without_values[op, one_line(error)] += 1
            return None

    def _refine_model(self, number: int, signature: Signature, argument: str) -> int:
        fitted = self._fitted[number]
        if fitted.model is None:
            self._deferred.set_outputs(number, signature.outputs)
            return number
        model = refine_model(signature.op, argument, fitted.model, signature.outputs)
        return number if model is fitted.model else self._number(replace(fitted, model=model))

    def _number(self, fitted: _Fitted) -> int:
        # compare by text, because nan makes equal models unequal
        text = f"{fitted.model} {fitted.key}"
        number = self._numbers.get(text)
        if number is None:
            assert fitted.model is not None
            number = self._next_number()
            self._fitted[number] = fitted
            self._pend(Values(number, fitted.model, fitted.key))
            # Update the lookup last: a number that can be looked up is then always written, even if this is
            # interrupted.
            self._numbers[text] = number
        return number


def _describe_by_index(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[tuple[int | str, torch.Tensor]]]:
    inputs: list[tuple[int | str, torch.Tensor]] = []

    def index_for(argument: int | str) -> FitValues:
        def index(tensor: torch.Tensor) -> int:
            inputs.append((argument, tensor))
            return len(inputs) - 1

        return index

    return describe_call(args, kwargs, index_for), inputs


def varies_by_values(signature: Signature, name: Hashable) -> bool:
    """Return True if the times or result sizes of a signature's calls may depend on values of its arguments."""
    named = _names(name)
    trees: list[tuple[int | str, Any]] = [*enumerate(signature.args), *signature.kwargs.items()]
    return any(
        depends_on_values(signature.op, named(place), spec.dtype) and 0 not in spec.shape and spec.shape != ()
        for place, tree in trees
        for spec in tensors(tree)
    )


def _names(name: Hashable) -> Callable[[int | str], str]:
    schema = getattr(name, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]

    def named(place: int | str) -> str:
        return names[place] if isinstance(place, int) and place < len(names) else str(place)

    return named
