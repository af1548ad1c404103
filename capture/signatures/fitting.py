"""Find and number the value models of what calls take, on the CPU or copied from an accelerator.

Nothing in the program's threads waits for the device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opgrip.capture.program.accelerators import GraphCaptures, accelerators, current_stream, is_capturing, on_device
from opgrip.capture.signatures.full_values import FullValues
from opgrip.capture.signatures.layouts import FitValues
from opgrip.capture.signatures.signatures import describe_call
from opgrip.errors import one_line, raise_if_from_program
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, numbers_of, tensors, with_numbers
from opgrip.traces.schema.records import Record, Signature, Values
from opgrip.traces.values import ValueModel, depends_on_values, fit_argument, has_needs, is_refined, refine_model
from opgrip.traces.values.model import sample

MOST_ELEMENTS = 1 << 22
"""Of a tensor that is copied whole; of a larger one, some are."""
MOST_BYTES = 256 << 20
"""That copies take of a device in all; of what comes beyond, no values are kept."""


@dataclass(slots=True)
class Waiting:
    """A copy that is on its way.

    Attributes
    ----------
    op, argument : what the tensor is
    outputs : of its call, once they are known
    """

    number: int
    op: str
    argument: str
    copy: torch.Tensor
    event: Any
    outputs: Any = None


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether to look at a tensor's values would wait for its device."""
    return tensor.device.type in accelerators()


def _mark(device: torch.device) -> Any:
    event = torch.Event(device=device)
    with on_device(device):
        event.record(current_stream(device))
    return event


class Deferred:
    """Copies in the order in which they were made."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._bytes = 0

    def add(self, number: int, op: str, argument: str, tensor: torch.Tensor) -> bool:
        """Copy a tensor's values; whether that can be."""
        if is_capturing(tensor.device.type):
            # a copy would become a part of the graph
            return False
        part = sample(tensor.detach(), MOST_ELEMENTS)
        if self._bytes + part.nbytes > MOST_BYTES:
            return False
        self._bytes += part.nbytes
        self._waiting.append(Waiting(number, op, argument, part.clone(), _mark(tensor.device)))
        return True

    def tell(self, number: int, outputs: Any) -> None:
        """Give what a call returned to a tensor that it took."""
        for item in reversed(self._waiting):
            if item.number == number:
                item.outputs = outputs
                return

    def ready(self, graphs: GraphCaptures, wait: bool) -> Iterator[tuple[int, torch.Tensor, Waiting]]:
        """Numbers and values of those that have come, each once.

        Parameters
        ----------
        graphs : the program's captures, between which devices may be asked
        wait : for all of them
        """
        while self._waiting:
            with graphs.question() as may_ask, on_device(self._waiting[0].copy.device):
                if not may_ask or not (wait or self._waiting[0].event.query()):
                    return
                item = self._waiting.popleft()
                self._bytes -= item.copy.nbytes
                # it is read in another stream than the one that it was made in, which does not wait for that
                item.event.synchronize()
                values = item.copy.cpu()
            yield item.number, values, item


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A model, and the key of the whole values where these are kept; of a deferred one there is no model yet."""

    model: ValueModel | None
    key: str | None = None


class Fitter:
    """The value models of one capture.

    Parameters
    ----------
    pend : takes the records that are to be written
    next_number : gives the numbers of models

    Attributes
    ----------
    full : keeps whole values, None where models of them will do
    without_values : tensors without a model, by operator and reason
    spared : no values are looked at
    """

    def __init__(
        self,
        pend: Callable[[Record], None],
        next_number: Callable[[], int],
        without_values: Counter[tuple[str, str]] | None = None,
    ) -> None:
        self.full: FullValues | None = None
        self.without_values: Counter[tuple[str, str]] = Counter() if without_values is None else without_values
        self.spared = False
        self._pend = pend
        self._numbers: dict[str, int] = {}
        self._next_number = next_number
        self._fitted: dict[int, _Fitted] = {}
        self._alike: dict[Hashable, list[int | None]] = {}
        self._deferred = Deferred()

    def describe_again(
        self, name: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with value models of their own.

        Parameters
        ----------
        name : the operator, or the name of a function
        """
        return describe_call(args, kwargs, self._fit_for(name))

    def describe(
        self, name: Hashable, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Hashable]:
        """Arguments with value models, and what those of signatures with such tensors have in common.

        The models are those of another such signature where the operator takes any values, or new ones: an optimizer
        whose step counts in a scalar has another signature in each step, of the same hundred tensors.
        """
        looked_at: list[tuple[int | str, torch.Tensor]] = []

        def note(argument: int | str) -> FitValues:
            def place(tensor: torch.Tensor) -> int:
                looked_at.append((argument, tensor))
                return len(looked_at) - 1

            return place

        # with places in that list for numbers
        described = describe_call(args, kwargs, note)
        op, named = str(name), _names(name)
        alike: Hashable = (op, tuple(tensors(described)))
        if any(has_needs(op, named(argument), tensor.dtype) for argument, tensor in looked_at):
            # an index must be within the dimension that a number chooses
            alike = (op, len(self._alike))
        # whole values are those of this call
        numbers = None if self.full is not None else self._alike.get(alike)
        if numbers is None and self.spared:
            numbers = [None] * len(looked_at)
        elif numbers is None:
            numbers = self._alike[alike] = [self.fit(op, named(argument), tensor) for argument, tensor in looked_at]
        places = numbers_of(described)
        described = with_numbers(described, [None if place is None else numbers[place] for place in places])
        return *described, alike

    def refine_by_outputs(self, signature: Signature, name: Hashable) -> Signature:
        """The signature, its models with what its outputs tell of them."""
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
        """Begin anew: models that come again get other numbers."""
        self._numbers.clear()
        self._alike.clear()

    def prune(self, numbers: set[int]) -> None:
        """Forget all models but these."""
        self._fitted = {number: fitted for number, fitted in self._fitted.items() if number in numbers}

    def fit_deferred(self, graphs: GraphCaptures, wait: bool = False) -> None:
        """Fit what was put off, as far as its values have come; or all of it."""
        for number, values, item in self._deferred.ready(graphs, wait):
            model = self._model(item.op, item.argument, values)
            if model is not None:
                model = model if item.outputs is None else refine_model(item.op, item.argument, model, item.outputs)
                self._pend(Values(number, model))

    def _fit_for(self, name: Hashable) -> Callable[[int | str], FitValues]:
        named, op = _names(name), str(name)

        def fit_for(argument: int | str) -> FitValues:
            return lambda tensor: self.fit(op, named(argument), tensor)

        return fit_for

    def fit(self, op: str, argument: str, tensor: torch.Tensor) -> int | None:
        """The number of the model of a tensor's values; None where there is none."""
        if is_deferred(tensor):
            number = self._next_number()
            if tensor.numel() == 0 or not self._deferred.add(number, op, argument, tensor):
                return None
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
            self._deferred.tell(number, signature.outputs)
            return number
        model = refine_model(signature.op, argument, fitted.model, signature.outputs)
        return number if model is fitted.model else self._number(replace(fitted, model=model))

    def _number(self, fitted: _Fitted) -> int:
        # by its text: nan makes equal models unequal
        text = f"{fitted.model} {fitted.key}"
        number = self._numbers.get(text)
        if number is None:
            assert fitted.model is not None
            number = self._next_number()
            self._fitted[number] = fitted
            self._pend(Values(number, fitted.model, fitted.key))
            # last: a number that is found is written, whatever interrupts this
            self._numbers[text] = number
        return number


def varies_by_values(signature: Signature, name: Hashable) -> bool:
    """Whether a signature's calls may take other times, or give other sizes, for the values that they take."""
    named = _names(name)
    trees: list[tuple[int | str, Any]] = [*enumerate(signature.args), *signature.kwargs.items()]
    return any(
        depends_on_values(signature.op, named(place), spec.dtype) and 0 not in spec.shape and spec.shape != ()
        for place, tree in trees
        for spec in tensors(tree)
    )


def _names(name: Hashable) -> Callable[[int | str], str]:
    """What gives an argument's name for its place or keyword."""
    schema = getattr(name, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]

    def named(place: int | str) -> str:
        return names[place] if isinstance(place, int) and place < len(names) else str(place)

    return named
