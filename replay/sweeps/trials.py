"""What becomes of a call when some of its arguments grow: found out by running it on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opgrip.replay.arguments.inputs import as_recorded
from opgrip.replay.operators import Unsupported, find_operator
from opgrip.replay.sweeps.growth import PLAIN, Growth, grown, grown_steps, growth_of, met_growth
from opgrip.traces.arguments import GeneratorSpec, TensorSpec, leaves, map_leaves, tensors
from opgrip.traces.errors import one_line
from opgrip.traces.records import Signature

FACTOR = 7
"""A prime that sizes of programs are seldom multiplied by, so that what is 7 times as large has grown."""

SIZE_ARGUMENTS = frozenset(
    {
        *("size", "sizes", "shape", "input_size", "input_sizes", "split_size", "split_sizes", "repeats"),
        *("sym_size", "end", "N"),
    }
)
"""Arguments that are sizes of tensors, which may be a batch's. An `output_size` is one of images."""
LISTED = ("aten.cat.default", "aten.stack.default")
RESHAPED = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default")


class Contradiction(Exception):
    """A call that cannot be one of a larger batch with these arguments, by the reason."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What of a call's arguments, beside its tensors, is multiplied.

    Attributes
    ----------
    numbers : places of whole numbers among the leaves of the arguments
    listed : whether the list of tensors is
    """

    numbers: frozenset[int] = frozenset()
    listed: bool = False


NOTHING = Choice()


def choices(signature: Signature, batch: int) -> list[Choice]:
    """What may have to be multiplied: single sizes, all sizes of parts, a list of tensors."""
    function = _function(signature)
    if function is None:
        return []
    schema = function._schema.arguments
    names = [schema[place].name if place < len(schema) else "" for place in range(len(signature.args))]
    found: list[Choice] = []
    together: list[Choice] = []
    leaf = 0
    for name, value in (*zip(names, signature.args, strict=True), *signature.kwargs.items()):
        values = list(leaves(value))
        if name in SIZE_ARGUMENTS:
            places = [leaf + at for at, item in enumerate(values) if _may_be_size(item, batch)]
            found += [Choice(frozenset({place})) for place in places]
            if name == "split_sizes" and len(places) == len(values) > 1:
                together.append(Choice(frozenset(places)))
        leaf += len(values)
    if signature.op in LISTED and len(signature.args[0]) == batch:
        found.append(Choice(listed=True))
    return found + together


def with_growth(signature: Signature, growths: Sequence[Growth], choice: Choice, factor: int) -> Signature:
    """The signature with its arguments as they would be in a batch `factor` times as large; its results as they are."""
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


def outcome(signature: Signature, growths: Sequence[Growth], choice: Choice, batch: int) -> tuple[Growth, ...]:
    """How the results grow.

    Raises
    ------
    Contradiction : where the call cannot be made like that, or gives what is no such result in a larger batch
    """
    function = _function(signature)
    if function is None:
        raise Contradiction("what it does with its arguments is not known")
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(function.tags):
        raise Contradiction("the shapes of its results depend on values")
    if _indexes_all(signature, growths):
        raise Contradiction("an index of the whole batch does not grow with it")
    taken, given = _run(function, with_growth(signature, growths, choice, FACTOR))
    memory = {tensor.untyped_storage()._cdata for tensor in taken}
    recorded = list(tensors(signature.outputs))
    if len(given) == len(recorded) * FACTOR and len(recorded) == batch:
        # a list of the elements of the batch
        return tuple(Growth(item=item) for item in range(batch))
    if len(given) != len(recorded):
        raise Contradiction(f"it gives {len(given)} tensors where it gave {len(recorded)}")
    if any(len(spec.shape) != tensor.dim() or 0 in spec.shape for spec, tensor in zip(recorded, given, strict=True)):
        # as those that some devices leave empty and others do not
        recorded = [_like(spec, tensor) for spec, tensor in zip(recorded, _run(function, signature)[1], strict=True)]
    met = [_met(spec, tensor, memory) for spec, tensor in zip(recorded, given, strict=True)]
    met = [_outer(signature, growths, spec, growth, batch) for spec, growth in zip(recorded, met, strict=True)]
    item = _item_taken(signature, growths, batch)
    return tuple(replace(growth, item=item) if growth == PLAIN else growth for growth in met)


def in_order(signature: Signature, growths: Sequence[Growth], found: Sequence[Choice], batch: int) -> Iterator[Choice]:
    """The choices, those that are more likely first."""
    stated = _sliced(signature, growths) or _put_back(signature, growths)
    if stated is not None:
        yield stated
    if signature.op in RESHAPED and growths[0].sizes:
        # a size of -1 takes whatever is left, so that others come first
        keys = {choice: _likely(signature, growths[0], choice, batch) for choice in found}
        found = sorted(found, key=keys.__getitem__)
        exact = [choice for choice in found if not keys[choice][0]]
        yield from (*exact, NOTHING, *(choice for choice in found if keys[choice][0]))
    else:
        yield from (NOTHING, *found)


def _run(function: Any, signature: Signature) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a call takes and gives on the meta device."""
    try:
        args, kwargs = _on_meta(signature.args), _on_meta(signature.kwargs)
        with torch.no_grad():
            results = function(*args, **kwargs)
    except Unsupported as error:
        raise Contradiction(str(error)) from error
    except Exception as error:
        raise Contradiction(one_line(error)) from error
    taken, given = (
        [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in ([args, kwargs], results)
    )
    return taken, given


def _like(spec: TensorSpec, tensor: torch.Tensor) -> TensorSpec:
    return replace(spec, shape=tuple(tensor.shape), stride=tuple(tensor.stride()), offset=int(tensor.storage_offset()))


def _met(spec: TensorSpec, tensor: torch.Tensor, memory: set[int]) -> Growth:
    try:
        if tensor.untyped_storage()._cdata in memory:
            return met_growth(spec, tensor.shape, tensor.stride(), int(tensor.storage_offset()), FACTOR)
        # kernels on the meta device lay results out in ways of their own
        sizes = met_growth(replace(spec, stride=()), tensor.shape, (), spec.offset, FACTOR).sizes
        return growth_of(spec, sizes)
    except ValueError as error:
        raise Contradiction(str(error)) from error


def _item_taken(signature: Signature, growths: Sequence[Growth], batch: int) -> int | None:
    """Which element of the batch a call takes out of it, None where it does something else."""
    if signature.op not in ("aten.select.int", "aten.slice.Tensor") or not growths[0].sizes:
        return None
    spec, dimension = next(tensors(signature.args)), _dimension(signature)
    start = signature.args[2] if len(signature.args) > 2 else 0
    if dimension not in growths[0].sizes or spec.shape[dimension] != batch or not isinstance(start, int):
        return None
    return start % batch


def _sliced(signature: Signature, growths: Sequence[Growth]) -> Choice | None:
    """Of a slice of the batch, that its bounds are multiplied; None for one element of it, and for other calls."""
    if signature.op != "aten.slice.Tensor" or len(signature.args) < 4 or not growths[0].sizes:
        return None
    spec, dimension = next(tensors(signature.args)), _dimension(signature)
    start, end = signature.args[2] or 0, signature.args[3]
    size = spec.shape[dimension]
    if dimension not in growths[0].sizes or not isinstance(end, int) or (end - start == 1 and size > 1):
        return None
    return Choice(frozenset(place for place, bound in ((2, start), (3, end)) if 0 < bound <= size))


def _indexes_all(signature: Signature, growths: Sequence[Growth]) -> bool:
    """Whether a call puts the batch in another order by an index that does not grow."""
    if signature.op == "aten.index_select.default":
        dimension = _dimension(signature)
    elif signature.op == "aten.index.Tensor" and isinstance(signature.args[1][0], TensorSpec):
        dimension = 0
    else:
        return False
    taken, index = list(tensors(signature.args))[:2]
    return (
        dimension in growths[0].sizes and not growths[1].any and index.shape == taken.shape[dimension : dimension + 1]
    )


def _put_back(signature: Signature, growths: Sequence[Growth]) -> Choice | None:
    """Of the gradient of a slice, the size of the whole, which the meta device does not compare; else None."""
    if signature.op not in ("aten.select_backward.default", "aten.slice_backward.default") or not growths[0].sizes:
        return None
    sizes, dimension = signature.args[1], signature.args[2] % len(signature.args[1])
    removed = len(sizes) > len(next(tensors(signature.args)).shape)
    places = [at + (removed and at >= dimension) for at in growths[0].sizes]
    # the tensor is the first leaf
    return Choice(frozenset(1 + at for at in places))


def _dimension(signature: Signature) -> int:
    spec = next(tensors(signature.args))
    dimension = signature.args[1] if len(signature.args) > 1 else 0
    return int(dimension) % max(len(spec.shape), 1)


def _likely(signature: Signature, growth: Growth, choice: Choice, batch: int) -> tuple[bool, bool, int]:
    """A key that sorts the sizes of a view: those of the batch alone first, then that which stays in its place."""
    # the tensor is the first leaf
    place = min(choice.numbers, default=0) - 1
    sizes = signature.args[1]
    known = 0 <= place < len(sizes)
    return not (known and sizes[place] == batch), place != growth.sizes[0], place


def _outer(signature: Signature, growths: Sequence[Growth], spec: TensorSpec, growth: Growth, batch: int) -> Growth:
    """The growth of a result with how often the batch stands in each dimension."""
    taken = list(zip(tensors([signature.args, signature.kwargs]), growths, strict=True))
    if signature.op in RESHAPED and len(growth.sizes) == len(growths[0].sizes) == 1:
        (before, known), at = taken[0], growth.sizes[0]
        # of the elements of the batch, how far they are from each other in row-major order
        apart = _product(before.shape[known.sizes[0] :]) // (known.outer[0] * batch)
        inner, rest = divmod(apart, _product(spec.shape[at + 1 :]))
        if rest or not inner or spec.shape[at] % (inner * batch):
            raise Contradiction("the batch is in another dimension")
        return replace(growth, outer=(spec.shape[at] // (inner * batch),))
    same = {
        item.shape[at]: outer
        for item, known in reversed(taken)
        for at, outer in zip(known.sizes, known.outer, strict=True)
    }
    return replace(growth, outer=tuple(same.get(spec.shape[at], 1) for at in growth.sizes))


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _with_steps(signature: Signature, numbers: frozenset[int]) -> frozenset[int]:
    """The same numbers, with the strides that a call is given beside the sizes among them."""
    lists = [(place, arg) for place, arg in enumerate(signature.args) if isinstance(arg, list | tuple)]
    function = _function(signature)
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
        raise Unsupported("a tensor without strides")
    whole = torch.empty(leaf.extent // max(leaf.dtype.itemsize, 1), dtype=leaf.dtype, device="meta")
    tensor = whole.as_strided(leaf.shape, leaf.stride, leaf.offset)
    return as_recorded(tensor, replace(leaf, requires_grad=False))


def _function(signature: Signature) -> Any:
    try:
        function = find_operator(signature).function
    except Unsupported:
        return None
    return function if isinstance(function, torch._ops.OpOverload) else None


def _may_be_size(value: Any, batch: int) -> bool:
    return type(value) is int and 0 < value < 1 << 40 and value % batch == 0
