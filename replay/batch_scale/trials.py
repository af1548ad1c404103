"""Trial runs of calls with a larger batch on the meta device, which show which sizes and arguments must grow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any

import torch

from opgrip.errors import one_line
from opgrip.replay.batch_scale.growth import (
    LISTED,
    NOTHING,
    PLAIN,
    RESHAPED,
    ArgumentChoice,
    Growth,
    choices,
    dimension_of,
    grown,
    grown_steps,
    growth_of,
    in_order,
    met_growth,
    operator_of,
)
from opgrip.replay.inputs.inputs import as_recorded
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces.schema.arguments import GeneratorSpec, Opaque, TensorSpec, leaves, map_leaves, tensors
from opgrip.traces.schema.records import Signature

# factor for trial runs: a prime by which programs rarely multiply sizes, so that a size 7 times as large must have
# grown
FACTOR = 7


class Contradiction(Exception):
    """Raised if a trial refutes the assumption that the given arguments grow with the batch: the call fails, or the
    sizes of its results do not reveal which of their dimensions grow.
    """


def with_growth(signature: Signature, growths: Sequence[Growth], choice: ArgumentChoice, factor: int) -> Signature:
    """Return the signature with arguments for a batch `factor` times as large; its recorded results do not change.

    growths : growth of each tensor argument
    choice : other arguments that grow
    """
    numbers = _with_steps(signature, choice.numbers)
    of_tensor, place = iter(growths), -1

    def scale(leaf: Any) -> Any:
        nonlocal place
        place += 1
        if isinstance(leaf, TensorSpec):
            return grown(leaf, next(of_tensor), factor)
        return leaf * factor if place in numbers else leaf

    args, kwargs = map_leaves(scale, signature.args), map_leaves(scale, signature.kwargs)
    if choice.listed:
        args = (args[0] * factor, *args[1:])
    return replace(signature, args=args, kwargs=kwargs)


def outcome(signature: Signature, growths: Sequence[Growth], choice: ArgumentChoice, batch: int) -> tuple[Growth, ...]:
    """Return how each result of a call grows if the call's tensor arguments grow by `growths`, and its other arguments
    by `choice`.

    The call runs with a larger batch on the meta device. Raises `Contradiction` if the call fails, or if the shapes of
    its results do not show how they grow.

    batch : recorded batch size
    """
    function = operator_of(signature)
    if function is None:
        raise Contradiction("the operator's use of its arguments is unknown")
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(function.tags):
        raise Contradiction("the shapes of its results depend on values")
    if _indexes_all(signature, growths):
        raise Contradiction("an index of the whole batch does not grow with it")
    argument_tensors, result_tensors = _run(function, with_growth(signature, growths, choice, FACTOR))
    memory = {tensor.untyped_storage()._cdata for tensor in argument_tensors}
    recorded = list(tensors(signature.outputs))
    if len(result_tensors) == len(recorded) * FACTOR and len(recorded) == batch:
        # a list with one tensor for each element of the batch
        return tuple(Growth(item=item) for item in range(batch))
    if len(result_tensors) != len(recorded):
        raise Contradiction(f"it returns {len(result_tensors)} tensors instead of {len(recorded)}")
    if any(
        len(spec.shape) != tensor.dim() or 0 in spec.shape
        for spec, tensor in zip(recorded, result_tensors, strict=True)
    ):
        # results that are empty only on some devices
        recorded = [
            _with_layout_of(spec, tensor) for spec, tensor in zip(recorded, _run(function, signature)[1], strict=True)
        ]
    result_growths = [
        _measure_growth(spec, tensor, memory) for spec, tensor in zip(recorded, result_tensors, strict=True)
    ]
    result_growths = [
        _outer(signature, growths, spec, growth, batch) for spec, growth in zip(recorded, result_growths, strict=True)
    ]
    item = _item_taken(signature, growths, batch)
    return tuple(replace(growth, item=item) if growth == PLAIN else growth for growth in result_growths)


def _run(function: Any, signature: Signature) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    try:
        args, kwargs = _on_meta(signature.args), _on_meta(signature.kwargs)
        with torch.no_grad():
            results = function(*args, **kwargs)
    except Unsupported as error:
        raise Contradiction(str(error)) from error
    except Exception as error:
        raise Contradiction(one_line(error)) from error
    result_leaves, recorded = list(leaves(results)), list(leaves(signature.outputs))
    if len(result_leaves) == len(recorded):
        # files of other tools lack some results
        result_leaves = [
            leaf for leaf, record in zip(result_leaves, recorded, strict=True) if not isinstance(record, Opaque)
        ]
    argument_tensors, result_tensors = (
        [leaf for leaf in items if isinstance(leaf, torch.Tensor)] for items in (leaves([args, kwargs]), result_leaves)
    )
    return argument_tensors, result_tensors


def _with_layout_of(spec: TensorSpec, tensor: torch.Tensor) -> TensorSpec:
    return replace(spec, shape=tuple(tensor.shape), stride=tuple(tensor.stride()), offset=int(tensor.storage_offset()))


def _measure_growth(spec: TensorSpec, tensor: torch.Tensor, memory: set[int]) -> Growth:
    try:
        if tensor.untyped_storage()._cdata in memory:
            return met_growth(spec, tensor.shape, tensor.stride(), int(tensor.storage_offset()), FACTOR)
        # kernels on the meta device choose other layouts
        sizes = met_growth(replace(spec, stride=()), tensor.shape, (), spec.offset, FACTOR).sizes
        return growth_of(spec, sizes)
    except ValueError as error:
        raise Contradiction(str(error)) from error


def _item_taken(signature: Signature, growths: Sequence[Growth], batch: int) -> int | None:
    """Return the index of the batch element that a call selects or at which its slice starts; None for other calls."""
    if signature.op not in ("aten.select.int", "aten.slice.Tensor") or not growths[0].sizes:
        return None
    spec, dimension = next(tensors(signature.args)), dimension_of(signature)
    start = signature.args[2] if len(signature.args) > 2 else 0
    if dimension not in growths[0].sizes or spec.shape[dimension] != batch or not isinstance(start, int):
        return None
    return start % batch


def _indexes_all(signature: Signature, growths: Sequence[Growth]) -> bool:
    """Return True if a call reorders the batch by an index tensor that does not grow with it."""
    if signature.op == "aten.index_select.default":
        dimension = dimension_of(signature)
    elif signature.op == "aten.index.Tensor" and isinstance(signature.args[1][0], TensorSpec):
        dimension = 0
    else:
        return False
    source, index = list(tensors(signature.args))[:2]
    return (
        dimension in growths[0].sizes and not growths[1].any and index.shape == source.shape[dimension : dimension + 1]
    )


def _outer(signature: Signature, growths: Sequence[Growth], spec: TensorSpec, growth: Growth, batch: int) -> Growth:
    """Return the growth of a result with `outer` filled in: how many times the batch repeats along each growing
    dimension.
    """
    arguments = list(zip(tensors([signature.args, signature.kwargs]), growths, strict=True))
    if signature.op in RESHAPED and len(growth.sizes) == len(growths[0].sizes) == 1:
        (before, argument_growth), at = arguments[0], growth.sizes[0]
        # distance between elements of the batch in row-major order
        batch_stride = prod(before.shape[argument_growth.sizes[0] :]) // (argument_growth.outer[0] * batch)
        inner, rest = divmod(batch_stride, prod(spec.shape[at + 1 :]))
        if rest or not inner or spec.shape[at] % (inner * batch):
            raise Contradiction(
                f"dimension {at} of its result, of size {spec.shape[at]}, does not contain the whole batch"
            )
        return replace(growth, outer=(spec.shape[at] // (inner * batch),))
    same = {
        item.shape[at]: outer
        for item, argument_growth in reversed(arguments)
        for at, outer in zip(argument_growth.sizes, argument_growth.outer, strict=True)
    }
    return replace(growth, outer=tuple(same.get(spec.shape[at], 1) for at in growth.sizes))


def _with_steps(signature: Signature, numbers: frozenset[int]) -> frozenset[int]:
    """Return the indices of growing sizes, and of the strides that grow with these sizes."""
    lists = [(place, arg) for place, arg in enumerate(signature.args) if isinstance(arg, list | tuple)]
    function = operator_of(signature)
    if len(lists) < 2 or not numbers or function is None:
        return numbers
    names = [argument.name for argument in function._schema.arguments]
    (at, sizes), (_, steps) = lists[:2]
    if names[at : at + 2] != ["size", "stride"] or len(sizes) != len(steps):
        return numbers
    chosen = [place - at for place in numbers]
    return numbers | {at + len(sizes) + step for step in grown_steps(sizes, steps, chosen)}


def _on_meta(tree: Any) -> Any:
    return map_leaves(_meta_leaf, tree)


def _meta_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if isinstance(leaf, GeneratorSpec):
        return None
    if not isinstance(leaf, TensorSpec):
        return leaf
    if leaf.stride is None or leaf.made_of is not None:
        raise Unsupported("one of its tensors is sparse, quantized or nested")
    whole = torch.empty(leaf.extent // max(leaf.dtype.itemsize, 1), dtype=leaf.dtype, device="meta")
    tensor = whole.as_strided(leaf.shape, leaf.stride, leaf.offset)
    return as_recorded(tensor, replace(leaf, requires_grad=False))


# if more dimensions of a call's arguments must grow: maximum number of candidates up to which pairs of them are tried,
# and maximum number of candidates that are tried alone
FEW, MOST_TRIED = 12, 40


@dataclass(frozen=True, slots=True)
class ScaledCall:
    """How a call changes with a larger batch.

    inputs : growth of each tensor argument
    choice : other arguments that grow
    outputs : growth of each result
    asks : (argument index, growth) of tensor arguments that would have to grow for the call to be possible
    """

    inputs: tuple[Growth, ...]
    choice: ArgumentChoice
    outputs: tuple[Growth, ...]
    asks: tuple[tuple[int, Growth], ...] = ()

    @property
    def lost(self) -> str | None:
        return next((growth.lost for growth in (*self.inputs, *self.outputs) if growth.lost is not None), None)


class Judge:
    """Determines how calls change with a larger batch, and caches what it found.

    batch : recorded batch size
    chosen : growing arguments of calls without a growing tensor, by signature number
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.chosen: dict[int, ArgumentChoice] = {}
        self._choices: dict[int, list[ArgumentChoice]] = {}
        self._verdict_cache: dict[Any, ScaledCall] = {}

    def judge(self, signature: Signature, growths: tuple[Growth, ...]) -> ScaledCall:
        """Return how a call changes with a larger batch if its tensor arguments grow by `growths`."""
        chosen = self.chosen.get(signature.number)
        if signature.op in LISTED and [growth.item for growth in growths] == list(range(self.batch)):
            chosen = ArgumentChoice(listed=True)
        key = (signature.number, growths, chosen)
        if key not in self._verdict_cache:
            self._verdict_cache[key] = self._find_verdict(signature, growths, chosen)
        return self._verdict_cache[key]

    def own(self, signature: Signature) -> list[ArgumentChoice]:
        """Return the sets of arguments that can make the results of a call grow while its tensor arguments keep their
        sizes.
        """
        own_choices = self._choices.get(signature.number)
        if own_choices is None:
            own_choices = []
            for choice in choices(signature, self.batch):
                try:
                    grows = any(map(len, self.sizes(signature, choice)))
                except Contradiction:
                    continue
                own_choices += [choice] if grows else []
            self._choices[signature.number] = own_choices
        return own_choices

    def sizes(self, signature: Signature, choice: ArgumentChoice) -> list[tuple[int, ...]]:
        """Return, for each result, the dimensions that grow if the arguments in `choice` are the only ones of a call
        that grow.
        """
        plain = (PLAIN,) * len(tensors_of(signature))
        return [growth.sizes for growth in outcome(signature, plain, choice, self.batch)]

    def _find_verdict(
        self, signature: Signature, growths: tuple[Growth, ...], chosen: ArgumentChoice | None
    ) -> ScaledCall:
        result_count = len(list(tensors(signature.outputs)))
        lost = next((growth.lost for growth in growths if growth.lost is not None), None)
        if lost is not None:
            return ScaledCall(growths, NOTHING, (Growth(lost=lost),) * max(result_count, 1))
        if chosen is None and not any(growth.any for growth in growths):
            items = {growth.item for growth in growths if growth.item is not None}
            return ScaledCall(growths, NOTHING, (Growth(item=items.pop() if len(items) == 1 else None),) * result_count)
        candidates = choices(signature, self.batch)
        likely = [*in_order(signature, growths, candidates, self.batch)] if chosen is None else [chosen, *candidates]
        try:
            return self._tested(signature, growths, likely)
        except Contradiction as contradiction:
            lost = f"it is unknown how {signature.op} scales with the batch: {contradiction}"
            asks = self._missing(signature, growths, candidates)
            return ScaledCall(growths, NOTHING, (Growth(lost=lost),) * max(result_count, 1), asks)

    def _tested(
        self, signature: Signature, growths: tuple[Growth, ...], candidates: Sequence[ArgumentChoice]
    ) -> ScaledCall:
        first, *others = candidates
        try:
            return ScaledCall(growths, first, outcome(signature, growths, first, self.batch))
        except Contradiction:
            for choice in others:
                with suppress(Contradiction):
                    return ScaledCall(growths, choice, outcome(signature, growths, choice, self.batch))
            raise

    def _missing(
        self, signature: Signature, growths: tuple[Growth, ...], candidates: Sequence[ArgumentChoice]
    ) -> tuple[tuple[int, Growth], ...]:
        """Return (argument index, growth) of the tensor arguments that must also grow for the call to be possible;
        empty if the search finds no such arguments.
        """
        specs = tensors_of(signature)
        open_to = [
            (place, growth_of(spec, [at]))
            for place, spec in enumerate(specs)
            for at, size in enumerate(spec.shape)
            if not growths[place].any and size and size % self.batch == 0
        ]
        for count in (1, 2) if len(open_to) <= FEW else (1,):
            for asks in combinations(open_to[:MOST_TRIED], count):
                if len({place for place, _ in asks}) == count:
                    try:
                        self._tested(signature, with_asked(growths, asks), [NOTHING, *candidates])
                    except Contradiction:
                        continue
                    return asks
        return ()


def tensors_of(signature: Signature) -> list[TensorSpec]:
    return list(tensors([signature.args, signature.kwargs]))


def with_asked(growths: tuple[Growth, ...], asks: Sequence[tuple[int, Growth]]) -> tuple[Growth, ...]:
    """Return the growths of a call's tensor arguments, where each (index, growth) in `asks` replaces the growth at that
    index.
    """
    changed = dict(asks)
    return tuple(changed.get(place, growth) for place, growth in enumerate(growths))
