"""Candidates of modules: users' classes and functions, called with the tensors of a recorded module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from opgrip.replay.cases.subgraphs import SubgraphOperator
from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.memory import Function
from opgrip.traces.schema.tensor_specs import tensor_outline

MOST_TENSORS = 12
"""maximum number of tensors that an error lists"""


def load_module(load: Callable[[], Any], operator: SubgraphOperator, args: Sequence[Any]) -> Function:
    """Return a user's implementation of a module as a function of the arguments of the recorded module.

    A function takes the tensors of the recorded module in the order of their first use. The parameters and buffers of
    an `nn.Module` are replaced by the recorded ones, and its `forward` takes the other tensors in that order.

    load : function that imports the implementation: a function, a class below `nn.Module` or an object of one
    args : arguments of the recorded module, on the device and in the dtype of the replay

    Raises
    ------
    Unsupported : if the tensors do not fit the class
    """
    found, tensors = load(), args[: len(operator.links.outside)]
    if not isinstance(found, nn.Module) and not (inspect.isclass(found) and issubclass(found, nn.Module)):
        return lambda *args, **kwargs: found(*args[: len(tensors)])
    module = deepcopy(found) if isinstance(found, nn.Module) else _made(found)
    module.train(operator.is_training).to(tensors[0].device if tensors else None)
    slots = list(_assigned(module, tensors, operator.links.stored))
    taken = {slot.place for slot in slots}
    inputs = [place for place in range(len(tensors)) if place not in taken]
    try:
        inspect.signature(module.forward).bind(*inputs)
    except TypeError as error:
        raise Unsupported(
            f"{_name(module)}.forward{inspect.signature(module.forward)} does not fit the tensors that are not its "
            f"parameters: {_listed([tensors[place] for place in inputs]) or 'none'}"
        ) from error
    return _ModuleCall(module, slots, inputs)


def _made(found: type[nn.Module]) -> nn.Module:
    try:
        return found()
    except TypeError as error:
        raise Unsupported(
            f"{found.__name__}() cannot be made without arguments: {error}: give them defaults"
        ) from error


@dataclass(frozen=True, slots=True)
class _Slot:
    """A parameter or buffer of a module, and the place of the recorded tensor that replaces it.

    owner : parameters or buffers of the submodule, by name
    """

    owner: dict[str, Any]
    name: str
    place: int


class _ModuleCall:
    """A module as a function of its tensors, some of which replace its parameters and buffers in each call."""

    def __init__(self, module: nn.Module, slots: Sequence[_Slot], inputs: Sequence[int]) -> None:
        self._module, self._inputs = module, inputs
        self._slots = [(slot.owner, slot.name, slot.place) for slot in slots]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for owner, name, place in self._slots:
            owner[name] = args[place]
        return self._module(*[args[place] for place in self._inputs])


def _assigned(module: nn.Module, tensors: Sequence[Tensor], stored: Sequence[bool]) -> Iterator[_Slot]:
    """Yield the parameters and buffers of a module, each with the first unused tensor of its shape.

    stored : for each tensor, True if it existed before the first recorded call; these are tried first
    """
    free = sorted(range(len(tensors)), key=lambda place: not stored[place])
    places: dict[int, int] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            raise Unsupported(f"{type(part).__name__} keeps its parameters in a list: call the operator in a function")
        for owner, is_parameter in ((part._parameters, True), (part._buffers, False)):
            for name, own in owner.items():
                if own is None:
                    continue
                place = places.get(id(own))
                if place is None:
                    place = next((place for place in free if _fits(own, tensors[place])), None)
                if place is None and is_parameter:
                    full = f"{path}.{name}" if path else name
                    rest = _listed([tensors[place] for place in free])
                    raise Unsupported(
                        f"{_name(module)}.{full} is {_outline(own)}, which fits no tensor of the recorded module that "
                        f"is left: {rest or 'none'}"
                    )
                if place is not None:
                    if place in free:
                        free.remove(place)
                    places[id(own)] = place
                    yield _Slot(owner, name, place)


def _fits(own: Tensor, tensor: Tensor) -> bool:
    # a replay may cast floating-point tensors
    are_floating = own.is_floating_point() and tensor.is_floating_point()
    return own.shape == tensor.shape and (are_floating or own.dtype == tensor.dtype)


def _name(module: nn.Module) -> str:
    return type(module).__name__


def _outline(tensor: Tensor) -> str:
    return tensor_outline(tensor.dtype, tensor.shape)


def _listed(tensors: Sequence[Tensor]) -> str:
    more = f" and {len(tensors) - MOST_TENSORS} more" if len(tensors) > MOST_TENSORS else ""
    return ", ".join(map(_outline, tensors[:MOST_TENSORS])) + more
