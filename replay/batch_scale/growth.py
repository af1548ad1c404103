"""How tensors (their sizes, strides and offsets) and other arguments change when the batch grows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces.schema.arguments import TensorSpec, leaves, tensors
from opgrip.traces.schema.records import Signature


@dataclass(frozen=True, slots=True)
class Growth:
    """Which sizes, strides and offset of a tensor are multiplied when the batch is multiplied.

    sizes : dimensions whose size is multiplied
    steps : dimensions whose stride is multiplied
    outer : for each dimension in `sizes`, how many times the batch of size B repeats along it: 1 if the dimension was
        made of (B, T), T if it was made of (T, B)
    offset : True if the offset is multiplied
    item : for a tensor that belongs to one element of the batch, the index of that element
    lost : why the growth is unknown; None if it is known
    """

    sizes: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    outer: tuple[int, ...] = ()
    offset: bool = False
    item: int | None = None
    lost: str | None = None

    @property
    def any(self) -> bool:
        return bool(self.sizes or self.steps or self.offset)


PLAIN = Growth()  # growth of a tensor that does not depend on the batch


def growth_of(spec: TensorSpec, sizes: Collection[int]) -> Growth:
    """Return the growth of a tensor with its own memory whose dimensions `sizes` are multiplied with the batch."""
    return Growth(tuple(sorted(sizes)), grown_steps(spec.shape, spec.stride or (), sizes), (1,) * len(sizes))


def grown_steps(shape: Sequence[int], stride: Sequence[int], sizes: Collection[int]) -> tuple[int, ...]:
    """Return the dimensions whose stride is multiplied because a dimension with a smaller stride grows.

    sizes : dimensions whose size is multiplied
    If a size of 1 makes two strides equal, the stride of the later dimension counts as smaller.
    """
    dimensions = []
    for outer in range(len(stride)):
        for inner in sizes:
            over = stride[outer] >= stride[inner] * max(shape[inner], 1)
            same = stride[outer] == stride[inner]
            if inner != outer and stride[outer] and stride[inner] and over and (not same or outer < inner):
                dimensions.append(outer)
                break
    return tuple(dimensions)


def grown(spec: TensorSpec, growth: Growth, factor: int) -> TensorSpec:
    """Return a tensor's spec for a batch `factor` times as large; raise `Unsupported` if the tensor grows and has no
    strides.

    growth : what is multiplied by the factor
    """
    if not growth.any:
        return spec
    if spec.stride is None or spec.made_of is not None:
        raise Unsupported("a tensor that is sparse, quantized or nested has no batch dimension to scale")
    return replace(
        spec,
        shape=_multiplied(spec.shape, growth.sizes, factor),
        stride=_multiplied(spec.stride, growth.steps, factor),
        offset=spec.offset * factor if growth.offset else spec.offset,
    )


def met_growth(spec: TensorSpec, shape: Sequence[int], stride: Sequence[int], offset: int, factor: int) -> Growth:
    """Return which sizes, strides and offset of `spec` were multiplied by `factor` to get `shape`, `stride` and
    `offset`; raise `ValueError` for any other change.
    """
    before, after = (*spec.shape, *(spec.stride or ())), (*shape, *stride)
    if len(before) != len(after):
        raise ValueError("a tensor has another number of dimensions at another batch size")
    moved = [place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    count = len(spec.shape)
    # operators choose the stride of a dimension of size one freely
    moved = [place for place in moved if place < count or before[place - count] > 1]
    if any(after[place] != before[place] * factor for place in moved):
        raise ValueError(f"a tensor of shape {tuple(spec.shape)} cannot grow to {tuple(shape)}")
    if offset not in (spec.offset, spec.offset * factor):
        raise ValueError(
            f"the offset of a tensor grows from {spec.offset} to {offset}, its sizes by the factor {factor}"
        )
    sizes = tuple(place for place in moved if place < count)
    steps = tuple(place - count for place in moved if place >= count)
    return Growth(sizes, steps, (1,) * len(sizes), offset != spec.offset)


def _multiplied(values: tuple[int, ...], places: Collection[int], factor: int) -> Any:
    return tuple(value * factor if place in places else value for place, value in enumerate(values))


# names of arguments that are sizes of tensors and may contain the batch; `output_size` is not, because it is a size of
# images
SIZE_ARGUMENTS = frozenset(
    {
        *("size", "sizes", "shape", "input_size", "input_sizes", "split_size", "split_sizes", "repeats"),
        *("sym_size", "end", "N"),
    }
)
LISTED = ("aten.cat.default", "aten.stack.default")
RESHAPED = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default")


@dataclass(frozen=True, slots=True)
class ArgumentChoice:
    """The arguments of a call, other than tensors, that grow with the batch.

    numbers : indices of integers that grow, among all values in the arguments
    listed : True if the list of tensors gets longer
    """

    numbers: frozenset[int] = frozenset()
    listed: bool = False


NOTHING = ArgumentChoice()


def choices(signature: Signature, batch: int) -> list[ArgumentChoice]:
    """Return the sets of arguments that may grow with the batch: single sizes, all split sizes together, or a list of
    tensors.

    batch : recorded batch size
    """
    function = operator_of(signature)
    if function is None:
        return []
    schema = function._schema.arguments
    names = [schema[place].name if place < len(schema) else "" for place in range(len(signature.args))]
    candidates: list[ArgumentChoice] = []
    together: list[ArgumentChoice] = []
    leaf = 0
    for name, value in (*zip(names, signature.args, strict=True), *signature.kwargs.items()):
        values = list(leaves(value))
        if name in SIZE_ARGUMENTS:
            places = [leaf + at for at, item in enumerate(values) if _may_be_size(item, batch)]
            candidates += [ArgumentChoice(frozenset({place})) for place in places]
            if name == "split_sizes" and len(places) == len(values) > 1:
                together.append(ArgumentChoice(frozenset(places)))
        leaf += len(values)
    if signature.op in LISTED and len(signature.args[0]) == batch:
        candidates.append(ArgumentChoice(listed=True))
    return candidates + together


def in_order(
    signature: Signature, growths: Sequence[Growth], candidates: Sequence[ArgumentChoice], batch: int
) -> Iterator[ArgumentChoice]:
    """Yield the candidates (sets of arguments that may grow), the likely ones first.

    growths : growth of each tensor argument
    batch : recorded batch size
    """
    stated = _sliced(signature, growths) or _put_back(signature, growths)
    if stated is not None:
        yield stated
    if signature.op in RESHAPED and growths[0].sizes:
        # a size of -1 takes the rest, so try other sizes first
        keys = {choice: _likely(signature, growths[0], choice, batch) for choice in candidates}
        candidates = sorted(candidates, key=keys.__getitem__)
        exact = [choice for choice in candidates if not keys[choice][0]]
        yield from (*exact, NOTHING, *(choice for choice in candidates if keys[choice][0]))
    else:
        yield from (NOTHING, *candidates)


def operator_of(signature: Signature) -> Any:
    try:
        function = find_operator(signature).function
    except Unsupported:
        return None
    return function if isinstance(function, torch._ops.OpOverload) else None


def dimension_of(signature: Signature) -> int:
    """Return the dimension that a call's second argument names, counted from the start; 0 if it names none."""
    spec = next(tensors(signature.args))
    dimension = signature.args[1] if len(signature.args) > 1 else 0
    return int(dimension) % max(len(spec.shape), 1)


def _sliced(signature: Signature, growths: Sequence[Growth]) -> ArgumentChoice | None:
    """Return the bounds of a slice as growing arguments if the slice cuts the batch dimension; None for a slice of one
    element and for other calls.
    """
    if signature.op != "aten.slice.Tensor" or len(signature.args) < 4 or not growths[0].sizes:
        return None
    spec, dimension = next(tensors(signature.args)), dimension_of(signature)
    start, end = signature.args[2] or 0, signature.args[3]
    size = spec.shape[dimension]
    if dimension not in growths[0].sizes or not isinstance(end, int) or (end - start == 1 and size > 1):
        return None
    return ArgumentChoice(frozenset(place for place, bound in ((2, start), (3, end)) if 0 < bound <= size))


def _put_back(signature: Signature, growths: Sequence[Growth]) -> ArgumentChoice | None:
    """Return the growing argument of the backward of a slice: the batch size among the sizes of the whole tensor; None
    for other calls.
    """
    if signature.op not in ("aten.select_backward.default", "aten.slice_backward.default") or not growths[0].sizes:
        return None
    sizes, dimension = signature.args[1], signature.args[2] % len(signature.args[1])
    removed = len(sizes) > len(next(tensors(signature.args)).shape)
    places = [at + (removed and at >= dimension) for at in growths[0].sizes]
    # the tensor is the first leaf
    return ArgumentChoice(frozenset(1 + at for at in places))


def _likely(signature: Signature, growth: Growth, choice: ArgumentChoice, batch: int) -> tuple[bool, bool, int]:
    """Return a key that sorts the size arguments of a view, the most likely batch size first: sizes equal to the batch,
    then the size at the position of the growing dimension.
    """
    # the tensor is the first leaf
    place = min(choice.numbers, default=0) - 1
    sizes = signature.args[1]
    has_size = 0 <= place < len(sizes)
    return not (has_size and sizes[place] == batch), place != growth.sizes[0], place


def _may_be_size(value: Any, batch: int) -> bool:
    return type(value) is int and 0 < value < 1 << 40 and value % batch == 0
