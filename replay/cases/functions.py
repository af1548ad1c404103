"""Cases of Python functions: each replays one function with given arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor

from opgrip.replay.cases.cases import Case
from opgrip.replay.operators.lookup import Operator
from opgrip.replay.operators.memory import tensors_in
from opgrip.traces.schema.arguments import Opaque, TensorSpec, map_leaves
from opgrip.traces.schema.records import FUNCTION, Signature
from opgrip.traces.values import Drawable

NOT_KNOWN = Opaque("not known")

FunctionArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TensorValues:
    """Input values that are the elements of a given tensor, repeated or cut to fill the requested shape."""

    tensor: Tensor

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        values = self.tensor.to(generator.device, dtype)
        if tuple(values.shape) == shape:
            return values
        elements = torch.Size(shape).numel()
        flat = values.reshape(-1)
        return flat.repeat(-(-elements // max(flat.numel(), 1)))[:elements].reshape(shape)


def function_case(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    number: int = 0,
    trial: FunctionTrial | None = None,
) -> Case:
    arguments = (tuple(args), dict(kwargs or {}))
    copies = (item.detach().clone(memory_format=torch.preserve_format) for item in tensors_in(list(arguments)))
    values = dict(enumerate(map(TensorValues, copies)))
    name = name or function.__qualname__
    return described_case(FunctionOperator(function, arguments, trial), arguments, values, name, number)


def described_case(
    operator: Operator, arguments: FunctionArguments, values: Mapping[int, Drawable], name: str, number: int
) -> Case:
    indices = count()
    storages: dict[int, int] = {}

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        storage = storages.setdefault(leaf.untyped_storage()._cdata, len(storages))
        return strided_spec(leaf, storage=storage, values=next(indices))

    described = map_leaves(describe, arguments)
    signature = Signature(number, FUNCTION, name, described[0], described[1], NOT_KNOWN)
    return Case(signature, values, 1, 0.0, 0.0, 0.0, operator=operator)


def strided_spec(tensor: Tensor, **others: Any) -> TensorSpec:
    return TensorSpec(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        str(tensor.device),
        offset=int(tensor.storage_offset()),
        requires_grad=tensor.requires_grad,
        **others,
    )


class LazyOperator(Operator):
    __slots__ = ()

    def _set(self, **attributes: object) -> None:
        # the base class is frozen
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class FunctionOperator(LazyOperator):
    """A Python function as an operator; the first read of `mutates` may call it on copies of its arguments."""

    __slots__ = ("_arguments", "_writes")
    _arguments: FunctionArguments
    _writes: bool | None

    def __init__(
        self, function: Callable[..., Any], arguments: FunctionArguments, trial: FunctionTrial | None = None
    ) -> None:
        self._set(function=function, _arguments=arguments, _writes=None if trial is None else trial.writes)

    @property
    def mutates(self) -> bool:
        if self._writes is None:
            self._set(_writes=try_function(self.function, self._arguments).writes)
        return bool(self._writes)


@dataclass(frozen=True, slots=True)
class FunctionTrial:
    """Result of running a function once on copies of its arguments.

    writes : True if the function wrote into its arguments, or raised an exception
    """

    writes: bool
    results: Any = None
    failed: bool = False


def try_function(function: Callable[..., Any], arguments: FunctionArguments) -> FunctionTrial:
    """Run a function once on copies of its arguments; an exception is not raised, but makes the trial `failed`."""
    args, kwargs = _copied(arguments)
    argument_tensors = tensors_in([args, kwargs])
    versions = [tensor._version for tensor in argument_tensors]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            results = function(*args, **kwargs)
        except Exception:
            return FunctionTrial(writes=True, failed=True)
        # writes through `.data` or numpy do not change a tensor's version
        writes = versions != [tensor._version for tensor in argument_tensors] or not all(
            map(_same_values, argument_tensors, tensors_in(list(arguments)))
        )
    return FunctionTrial(writes, results)


def _copied(arguments: Any) -> Any:
    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.copy(leaf)
        return leaf.detach().clone()

    return map_leaves(copied, arguments)


def _same_values(one: Tensor, other: Tensor) -> bool:
    try:
        different = one != other
        if one.is_floating_point() or one.is_complex():
            different &= ~(one.isnan() & other.isnan())
        return not bool(different.any())
    except (RuntimeError, NotImplementedError):
        return True
