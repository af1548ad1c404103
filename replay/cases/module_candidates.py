"""Candidates of modules: users' classes and functions, called with the tensors of a recorded module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from opgrip.replay.cases.subgraphs import SubgraphOperator
from opgrip.replay.operators.admission import Unsupported
from opgrip.replay.operators.memory import Function
from opgrip.traces.schema.tensor_specs import tensor_outline

MOST_TENSORS = 12  # maximum number of tensors that an error lists


def load_module(load: Callable[[], Any], operator: SubgraphOperator, args: Sequence[Any]) -> Function:
    """Return a user's implementation of a module as a function of the arguments of the recorded module.

    A function takes the tensors of the recorded module in the order of their first use. The parameters and buffers of
    an `nn.Module` are replaced by the recorded ones, and its `forward` takes the other tensors in that order.

    load : function that imports the implementation: a function, a class below `nn.Module` or an object of one
    args : arguments of the recorded module, on the device and in the dtype of the replay

    Raises Unsupported if the tensors do not fit the class.
    """
    loaded, tensors = load(), args[: len(operator.links.outside)]
    if not isinstance(loaded, nn.Module) and not (inspect.isclass(loaded) and issubclass(loaded, nn.Module)):
        return lambda *args, **kwargs: loaded(*args[: len(tensors)])
    module = deepcopy(loaded) if isinstance(loaded, nn.Module) else _instance_of(loaded)
    module.train(operator.is_training).to(tensors[0].device if tensors else None)
    slots = list(_slots(module, tensors, operator.links.stored))
    inputs = sorted(set(range(len(tensors))) - {place for _, _, place in slots})
    try:
        inspect.signature(module.forward).bind(*inputs)
    except TypeError as error:
        raise Unsupported(
            f"{type(module).__name__}.forward{inspect.signature(module.forward)} does not fit the tensors that are not "
            f"its parameters: {_listed(tensors[place] for place in inputs)}"
        ) from error

    def call(*args: Any, **kwargs: Any) -> Any:
        for owner, name, place in slots:
            owner[name] = args[place]
        return module(*[args[place] for place in inputs])

    return call


def _instance_of(module_class: type[nn.Module]) -> nn.Module:
    try:
        return module_class()
    except TypeError as error:
        raise Unsupported(
            f"{module_class.__name__}() cannot be made without arguments: {error}: give them defaults"
        ) from error


def _slots(
    module: nn.Module, tensors: Sequence[Tensor], stored: Sequence[bool]
) -> Iterator[tuple[dict[str, Any], str, int]]:
    """Yield, for each parameter and buffer of a module, the dictionary that holds it, its name there, and the place of
    the first unused tensor of its shape, which replaces it.
    """
    free = sorted(range(len(tensors)), key=lambda place: not stored[place])
    places: dict[int, int] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            raise Unsupported(f"{type(part).__name__} keeps its parameters in a list: call the operator in a function")
        for name, own in [*part._parameters.items(), *part._buffers.items()]:
            if own is None:
                continue
            # parameters that are used twice have one tensor
            place = places.get(id(own), next((place for place in free if _fits(own, tensors[place])), None))
            owner = part._parameters if name in part._parameters else part._buffers
            if place is not None:
                places[id(own)] = place
                free = [other for other in free if other != place]
                yield owner, name, place
            elif owner is part._parameters:
                raise Unsupported(
                    f"{type(module).__name__}.{f'{path}.' if path else ''}{name} is {_listed([own])}, which fits no "
                    f"tensor of the recorded module that is left: {_listed(tensors[place] for place in sorted(free))}"
                )


def _fits(own: Tensor, tensor: Tensor) -> bool:
    # a replay may cast floating-point tensors
    are_floating = own.is_floating_point() and tensor.is_floating_point()
    return own.shape == tensor.shape and (are_floating or own.dtype == tensor.dtype)


def _listed(tensors: Iterable[Tensor]) -> str:
    outlines = [tensor_outline(tensor.dtype, tensor.shape) for tensor in tensors]
    more = f" and {len(outlines) - MOST_TENSORS} more" if len(outlines) > MOST_TENSORS else ""
    return f"{', '.join(outlines[:MOST_TENSORS])}{more}" or "none"
