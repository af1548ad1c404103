"""Prepared calls of step replay: operators that take some of their arguments from the results of earlier calls.

At each call, `PreparedCall` fills in views of memory that earlier calls produced. All other arguments are created once
and, if the operator changes them, restored before each pass. `DrawnValues` decides whether a call can use the values in
that memory, and replaces them by values drawn from value models if not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from opgrip.replay.cases.flow import can_flow
from opgrip.replay.inputs.filling import memory_of
from opgrip.replay.inputs.inputs import DeviceMap, Inputs
from opgrip.replay.inputs.layouts import as_argument
from opgrip.replay.operators.agreement import check_agreement
from opgrip.replay.operators.agreement.indices import bounded_arguments
from opgrip.replay.operators.lookup import Operator
from opgrip.replay.operators.memory import Arguments
from opgrip.replay.sequences.step_memory import StepMemory
from opgrip.traces.schema.arguments import GeneratorSpec, TensorSpec, leaves, map_leaves
from opgrip.traces.schema.python_objects import children
from opgrip.traces.schema.records import EXTENSION, OPERATOR, Signature
from opgrip.traces.values import ValueModel
from opgrip.traces.values.boxes import MAX_COLUMNS, Boxes
from opgrip.traces.values.distribution import Probabilities
from opgrip.traces.values.exact import Constant, Exact, OneHot
from opgrip.traces.values.floats import Floats
from opgrip.traces.values.progression import Progression

FAR = 1e3  # factor by which floats above 1 may exceed the recorded maximum


@dataclass(frozen=True, slots=True)
class _Flowing:
    """Placeholder in a call's arguments for a tensor in memory that an earlier call allocated.

    index : index of the tensor among the call's argument tensors
    """

    index: int
    spec: TensorSpec


# function that creates a part of a call's arguments from the memory of its tensors
Filling: TypeAlias = Callable[[StepMemory, tuple[int, ...]], Any]


class PreparedCall:
    """An operator with its arguments, some of which are taken from the results of earlier calls.

    drawn : indices of the argument tensors that have their own memory, with values drawn from value models
    values, place, seed : value models by number, map from recorded to replay devices, and random seed
    Raises `Unsupported` if the arguments cannot be created.
    """

    def __init__(
        self,
        signature: Signature,
        operator: Operator,
        drawn: Collection[int],
        values: Mapping[int, ValueModel],
        place: DeviceMap,
        seed: int,
    ) -> None:
        check_agreement(operator.function, signature.args, signature.kwargs)
        self.function: Callable[..., Any] = operator.function
        count = 0

        def mark(leaf: Any) -> Any:
            nonlocal count
            if not isinstance(leaf, TensorSpec):
                return leaf
            count += 1
            return leaf if count - 1 in drawn else _Flowing(count - 1, leaf)

        args, kwargs = map_leaves(mark, signature.args), map_leaves(mark, dict(signature.kwargs))
        self._inputs = Inputs(args, kwargs, values, place, seed)
        self._changes = bool(drawn) and operator.mutates
        if self._changes:
            self._inputs.keep()
        generators = any(isinstance(leaf, GeneratorSpec) for leaf in leaves([args, kwargs]))
        same = None if generators or self._changes else self._inputs.make()
        # a Python function could change a list argument
        is_reused = signature.kind == OPERATOR
        self._positional = None if same is None else [_filling(value, is_reused) for value in same[0]]
        self._named = {} if same is None else {name: _filling(value, is_reused) for name, value in same[1].items()}

    def begin(self) -> None:
        """Restore the drawn arguments that the operator changes to their initial values."""
        if self._changes:
            self._inputs.restore()

    def arguments(self, memory: StepMemory, storages: tuple[int, ...]) -> Arguments:
        """Return positional and keyword arguments; indices that the operator does not check are clamped to valid ones.

        memory : storages of the step, which contain the argument tensors
        storages : for each argument tensor, the number of the storage that it uses
        Raises `Unsupported` if indices cannot be clamped.
        """
        if self._positional is None:
            own_arguments = self._inputs.make()
            args, kwargs = _filled(own_arguments[0], memory, storages), _filled(own_arguments[1], memory, storages)
        else:
            args = tuple(fill(memory, storages) for fill in self._positional)
            kwargs = {name: fill(memory, storages) for name, fill in self._named.items()}
        return bounded_arguments(self.function, args, kwargs)


def _filling(value: Any, is_reused: bool) -> Filling:
    """Return a function that creates one argument of a call; if `is_reused` is True, an argument without placeholders
    is created only once.
    """
    if type(value) is _Flowing:
        return lambda memory, storages: as_argument(memory.view(storages[value.index], value.spec), value.spec)
    if children(value) is None or (is_reused and not any(type(leaf) is _Flowing for leaf in leaves(value))):
        return lambda memory, storages: value
    return lambda memory, storages: _filled(value, memory, storages)


def _filled(tree: Any, memory: StepMemory, storages: tuple[int, ...]) -> Any:
    def fill(leaf: Any) -> Any:
        if type(leaf) is not _Flowing:
            return leaf
        return as_argument(memory.view(storages[leaf.index], leaf.spec), leaf.spec)

    return map_leaves(fill, tree)


class DrawnValues:
    """Decides whether calls can use the values in memory of earlier calls, and replaces unusable ones by values drawn
    from value models.

    defers : if True, `allows_floats` returns True without waiting for the device, and `found_excess` reports later
        whether that was right
    """

    def __init__(self, values: Mapping[int, ValueModel], place: DeviceMap, seed: int, memory: StepMemory) -> None:
        self._values, self._place, self._seed, self._memory = values, place, seed, memory
        self._tensors: dict[TensorSpec, torch.Tensor] = {}
        self._ranges: dict[TensorSpec, tuple[int, int]] = {}
        self.defers = False
        self._deferred: list[tuple[torch.Tensor, float]] = []

    def write(self, number: int, spec: TensorSpec) -> None:
        """Write drawn values into the memory of a tensor; allocate new memory if the storage is too small.

        number : number of the storage
        """
        if not self._memory.holds(number, spec):
            self._memory.renew(number)
        target, drawn = self._memory.view(number, spec), self._tensor(spec)
        try:
            target.copy_(drawn)
        except RuntimeError:
            # elements share memory: copy all of it; the drawn tensor has the same layout
            first, size = spec.offset * spec.dtype.itemsize, spec.extent
            to, since = memory_of(target.untyped_storage()), memory_of(drawn.untyped_storage())
            to[first:size].copy_(since[first:size])

    def allows_floats(self, spec: TensorSpec, tensor: torch.Tensor) -> bool:
        """Return True if the floats in a tensor are finite and not far larger than the recorded ones, or if the
        recorded ones are unknown or not finite.

        This is checked because a trace misses some writes of the program, and one wrong value can make all later
        results nan.
        """
        model = None if spec.values is None else self._values.get(spec.values)
        bound = None if model is None else _largest(model)
        if not spec.dtype.is_floating_point or 0 in spec.shape or bound is None:
            return True
        # one kernel, without copies of the tensor; 8-bit floats lack it
        wide = tensor if tensor.itemsize > 1 else tensor.float()
        largest = torch.linalg.vector_norm(wide, math.inf, dtype=None if wide.itemsize > 3 else torch.float32)
        limit = FAR * max(bound, 1.0)
        if self.defers and tensor.device.type != "cpu":
            self._deferred.append((largest, limit))
            return True
        return _is_within(float(largest), limit)

    def found_excess(self) -> bool:
        """Return True if a check since the last query was deferred and has found floats that are not allowed."""
        deferred, self._deferred = self._deferred, []
        if not deferred:
            return False
        device = deferred[0][0].device
        largest = torch.stack([tensor.to(device) for tensor, _ in deferred]).tolist()
        return not all(_is_within(value, limit) for value, (_, limit) in zip(largest, deferred, strict=True))

    def allows_indices(self, spec: TensorSpec, tensor: torch.Tensor) -> bool:
        """Return True if the integers in a tensor are in the recorded range; operators may use them as indices without
        checking them.
        """
        if spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype is torch.bool or 0 in spec.shape:
            return True
        if spec not in self._ranges:
            self._ranges[spec] = _range(self._tensor(spec))
        low, high = self._ranges[spec]
        lowest, highest = _range(tensor)
        return low <= lowest and highest <= high

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        if spec not in self._tensors:
            self._memory.charge(spec.extent)
            try:
                inputs = Inputs((replace(spec, cls=None),), {}, self._values, self._place, self._seed)
                self._tensors[spec] = inputs.make()[0][0]
            except BaseException:
                self._memory.refund(spec.extent)
                raise
        return self._tensors[spec]


def never_flowing(signature: Signature, specs: tuple[TensorSpec, ...], values: Mapping[int, ValueModel]) -> set[int]:
    """Return the indices of the argument tensors that are never taken from earlier calls, only drawn.

    These are arguments of extension functions, which read memory at unchecked indices. Such indices can be integers or
    columns of floats, so only tensors that cannot be indices are taken from earlier calls.
    """
    if signature.kind != EXTENSION:
        return set()
    return {index for index, spec in enumerate(specs) if not (can_flow(spec) and _are_plain_floats(spec, values))}


def _are_plain_floats(spec: TensorSpec, values: Mapping[int, ValueModel]) -> bool:
    rows = len(spec.shape) == 2 and spec.shape[1] <= MAX_COLUMNS
    model = None if spec.values is None else values.get(spec.values)
    return spec.dtype.is_floating_point and isinstance(model, Floats) and not rows


def _is_within(largest: float, limit: float) -> bool:
    return math.isfinite(largest) and largest <= limit


def _largest(model: ValueModel) -> float | None:
    """Return the largest absolute value that a value model draws; None if it is unknown or some recorded values were
    not finite.
    """
    match model:
        case Floats(nan=0, inf=0, minus_inf=0) | Boxes():
            bounds = [model.low, model.high] if isinstance(model, Floats) else [*model.low, *model.high]
        case Exact():
            bounds = [value for value in model.data if isinstance(value, int | float)]
        case Constant(value) if isinstance(value, int | float):
            bounds = [value]
        case Progression():
            bounds = [model.start, model.start + model.step * (model.period - 1)]
        case OneHot() | Probabilities():
            bounds = [1]
        case _:
            return None
    return max(map(abs, bounds)) if bounds and all(map(math.isfinite, bounds)) else None


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    low, high = torch.aminmax(tensor)
    return int(low), int(high)
