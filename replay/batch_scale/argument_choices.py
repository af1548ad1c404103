"""What of a call's arguments, beside its tensors, may be a size of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.replay.batch_scale.growth import Growth
from opgrip.replay.operators.lookup import Unsupported, find_operator
from opgrip.traces.schema.arguments import leaves, tensors
from opgrip.traces.schema.records import Signature

SIZE_ARGUMENTS = frozenset(
    {
        *("size", "sizes", "shape", "input_size", "input_sizes", "split_size", "split_sizes", "repeats"),
        *("sym_size", "end", "N"),
    }
)
"""Arguments that are sizes of tensors, which may be a batch's. An `output_size` is one of images."""
LISTED = ("aten.cat.default", "aten.stack.default")
RESHAPED = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten._reshape_alias.default")


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
    function = operator_of(signature)
    if function is None:
        return []
    schema = function._schema.arguments
    names = [schema[place].name if place < len(schema) else "" for place in range(len(signature.args))]
    candidates: list[Choice] = []
    together: list[Choice] = []
    leaf = 0
    for name, value in (*zip(names, signature.args, strict=True), *signature.kwargs.items()):
        values = list(leaves(value))
        if name in SIZE_ARGUMENTS:
            places = [leaf + at for at, item in enumerate(values) if _may_be_size(item, batch)]
            candidates += [Choice(frozenset({place})) for place in places]
            if name == "split_sizes" and len(places) == len(values) > 1:
                together.append(Choice(frozenset(places)))
        leaf += len(values)
    if signature.op in LISTED and len(signature.args[0]) == batch:
        candidates.append(Choice(listed=True))
    return candidates + together


def in_order(
    signature: Signature, growths: Sequence[Growth], candidates: Sequence[Choice], batch: int
) -> Iterator[Choice]:
    """The choices, those that are more likely first."""
    stated = _sliced(signature, growths) or _put_back(signature, growths)
    if stated is not None:
        yield stated
    if signature.op in RESHAPED and growths[0].sizes:
        # a size of -1 takes whatever is left, so that others come first
        keys = {choice: _likely(signature, growths[0], choice, batch) for choice in candidates}
        candidates = sorted(candidates, key=keys.__getitem__)
        exact = [choice for choice in candidates if not keys[choice][0]]
        yield from (*exact, NOTHING, *(choice for choice in candidates if keys[choice][0]))
    else:
        yield from (NOTHING, *candidates)


def operator_of(signature: Signature) -> Any:
    """The operator that a call is of, None where it is of something else or not known."""
    try:
        function = find_operator(signature).function
    except Unsupported:
        return None
    return function if isinstance(function, torch._ops.OpOverload) else None


def dimension_of(signature: Signature) -> int:
    """The dimension that a call is told to work along."""
    spec = next(tensors(signature.args))
    dimension = signature.args[1] if len(signature.args) > 1 else 0
    return int(dimension) % max(len(spec.shape), 1)


def _sliced(signature: Signature, growths: Sequence[Growth]) -> Choice | None:
    """Of a slice of the batch, that its bounds are multiplied; None for one element of it, and for other calls."""
    if signature.op != "aten.slice.Tensor" or len(signature.args) < 4 or not growths[0].sizes:
        return None
    spec, dimension = next(tensors(signature.args)), dimension_of(signature)
    start, end = signature.args[2] or 0, signature.args[3]
    size = spec.shape[dimension]
    if dimension not in growths[0].sizes or not isinstance(end, int) or (end - start == 1 and size > 1):
        return None
    return Choice(frozenset(place for place, bound in ((2, start), (3, end)) if 0 < bound <= size))


def _put_back(signature: Signature, growths: Sequence[Growth]) -> Choice | None:
    """Of the gradient of a slice, the size of the whole, which the meta device does not compare; else None."""
    if signature.op not in ("aten.select_backward.default", "aten.slice_backward.default") or not growths[0].sizes:
        return None
    sizes, dimension = signature.args[1], signature.args[2] % len(signature.args[1])
    removed = len(sizes) > len(next(tensors(signature.args)).shape)
    places = [at + (removed and at >= dimension) for at in growths[0].sizes]
    # the tensor is the first leaf
    return Choice(frozenset(1 + at for at in places))


def _likely(signature: Signature, growth: Growth, choice: Choice, batch: int) -> tuple[bool, bool, int]:
    """A key that sorts the sizes of a view: those of the batch alone first, then that which stays in its place."""
    # the tensor is the first leaf
    place = min(choice.numbers, default=0) - 1
    sizes = signature.args[1]
    has_size = 0 <= place < len(sizes)
    return not (has_size and sizes[place] == batch), place != growth.sizes[0], place


def _may_be_size(value: Any, batch: int) -> bool:
    return type(value) is int and 0 < value < 1 << 40 and value % batch == 0
