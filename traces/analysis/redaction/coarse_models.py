"""Rounding of numbers and value models for redaction, after which calls have about the same time and output sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import frexp, isfinite, ldexp, prod, trunc
from typing import Any

import torch

from opgrip.errors import FormatError
from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.tensor_specs import Compressed, Coo, Nested, memory_dtype
from opgrip.traces.values import ValueModel, reads_places, refine_model, requested_kinds, sizes_outputs
from opgrip.traces.values.boxes import Boxes
from opgrip.traces.values.distribution import Probabilities
from opgrip.traces.values.exact import Booleans, Constant, Exact, OneHot
from opgrip.traces.values.floats import Floats
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.matrices import Factorable, Triangular
from opgrip.traces.values.order import Permutation
from opgrip.traces.values.progression import Offsets, Progression


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Facts about the shapes of a call, which decide how its numbers are redacted.

    sizes : sizes of all dimensions of arguments and results
    extent : number of elements of the largest tensor, or from the start of a storage to a tensor's end, if that is more
    pinned : by integer, its replacement, so that equal integers in the call stay equal; sizes stay unchanged
    """

    sizes: frozenset[int]
    extent: int
    pinned: dict[int, int]


def call_facts(sizes: Collection[int], extent: int, replacements: Mapping[int, int] | None = None) -> CallFacts:
    """Return the `CallFacts` of a call whose tensors have these sizes; each size, and each size minus one, stays.

    sizes, extent : as in `CallFacts`
    replacements : by integer, its replacement in this call; takes precedence over `sizes`
    """
    pinned = {number: number for size in sizes for number in (size - 1, size) if number > 0}
    return CallFacts(frozenset(sizes), extent, pinned | dict(replacements or {}))


def facts_of(args: Any, outputs: Any) -> CallFacts:
    """Return the `CallFacts` for the tensors in a call's arguments and results (nested `TensorSpec`)."""
    sizes: set[int] = set()
    extent = 0
    for spec in tensors([args, outputs]):
        for one in (spec, *spec.parts):
            sizes.update(one.shape)
            extent = max(extent, prod(one.shape), one.extent // max(1, one.dtype.itemsize))
    return call_facts(sizes, extent)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor of a call that can have a value model.

    op, argument : operator of the call, and name of the argument that holds the tensor
    number : number of its value model, or None
    shape, dtype : shape and dtype of the values drawn from the model
    """

    op: str
    argument: str
    number: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def slots_of(op: str, argument: str, spec: TensorSpec) -> Iterator[TensorSlot]:
    """Yield each tensor within an argument, such as the indices of a sparse tensor, that can have a value model."""
    parts: tuple[TensorSpec, ...] = (spec,)
    match spec.made_of:
        case Coo(indices, rows, values):
            for number in rows:
                yield TensorSlot(op, argument, number, tuple(indices.shape[1:]), torch.int64)
            parts = (values,)
        case Compressed() | Nested():
            parts = spec.parts
    for part in parts:
        yield TensorSlot(op, argument, part.values, part.shape, memory_dtype(part.dtype))


BITS = 3  # number of leading bits that a rounded number keeps
LARGEST = (1 << 63) - 1


def coarse_int(value: int) -> int:
    """Return an integer rounded towards zero to its `BITS` leading bits, so that a valid index stays valid."""
    size = abs(value)
    dropped = max(0, size.bit_length() - BITS)
    size = size >> dropped << dropped
    return size if value >= 0 else -size


def coarse_float(value: float) -> float:
    """Return a float rounded to its `BITS` leading bits; zero, infinities and nan stay unchanged."""
    if not isfinite(value) or not value:
        return value
    mantissa, exponent = frexp(value)
    # an integer number of eighths, which a float of any width can hold
    return ldexp(trunc(mantissa * (1 << BITS)) / (1 << BITS), exponent)


def coarse(value: int | float) -> int | float:
    """Return a number rounded to its `BITS` leading bits; a boolean stays unchanged."""
    if isinstance(value, bool):
        return value
    return coarse_int(value) if isinstance(value, int) else coarse_float(value)


def rounded_up(value: int) -> int:
    """Return an integer whose magnitude is the next power of two, at most `LARGEST`."""
    size = min(LARGEST, 1 << (abs(value) - 1).bit_length())
    return size if value >= 0 else -size


class IntegerMap:
    """Map from the integers of a tensor to replacements of the same sign, no larger magnitude and similar size.

    The integers between two powers of two are replaced by equally spaced integers in that range. Equal numbers stay
    equal, different ones stay different, sorted ones stay sorted, zero stays zero, and a valid index stays valid.

    pinned : by integer, the replacement that follows from the call's shapes or scalars
    """

    def __init__(self, values: Iterable[int], pinned: Mapping[int, int] | None = None) -> None:
        pinned = pinned or {}
        distinct = set(values)
        self._images = {value: pinned[value] for value in distinct & pinned.keys()}
        used_images = set(self._images.values())
        for sign in (1, -1):
            sizes = sorted(sign * value for value in distinct - self._images.keys() if sign * value > 0)
            self._spread(sizes, sign, {sign * image for image in used_images})
        if 0 in distinct:
            self._images.setdefault(0, 0)

    def __getitem__(self, value: int) -> int:
        return self._images[value]

    def _spread(self, sizes: list[int], sign: int, used_images: set[int]) -> None:
        for bits in sorted({size.bit_length() for size in sizes}):
            members = [size for size in sizes if size.bit_length() == bits]
            low, last = 1 << (bits - 1), members[-1]
            top = max(coarse_int(last), low + len(members) - 1)
            if bits < sizes[-1].bit_length():
                top = (1 << bits) - 1
            gaps = max(1, len(members) - 1)
            before = low - 1
            for place, size in enumerate(members):
                image = max(before + 1, low + (top - low) * place // gaps)
                while image in used_images:
                    image += 1
                # pinned numbers can fill the range: two numbers then share an image
                before = image if image <= max(top, last) else low
                self._images[size * sign] = before * sign


PLACES = "sizes and positions in memory: other values would be out of bounds"
ARRANGED = "the order of equal values decides the outputs' sizes: other values in that order"
# reasons why the values of a tensor, or their order, stay in the trace
GROUPED = "how boxes overlap decides how many are kept, and these are too few for a model"
# names of arguments whose elements add up to a size
LENGTHS = ("repeats", "lengths", "input_lengths", "target_lengths")

# value models that can replace the values of a small tensor, in the order in which they are tried
_SKETCHES: tuple[Any, ...] = (
    *(Factorable, Triangular, Constant, OneHot, Booleans, Permutation, Probabilities, Boxes, Integers, Floats),
)
# value models that only some arguments may get, because fitted to few values they reveal more than other models
_REQUESTED = {Factorable: "factorable", Triangular: "triangular", Boxes: "boxes", Probabilities: "probabilities"}


@dataclass(frozen=True, slots=True)
class RedactedModel:
    """Redacted value model of a tensor.

    model : the redacted model, or None if no part of it may stay
    kept : reason why the values or their order stay unchanged; empty if neither does
    """

    model: ValueModel | None
    kept: str = ""


def redact_model(model: ValueModel, slot: TensorSlot, facts: CallFacts, outputs: Any) -> RedactedModel:
    """Return the redacted value model of a tensor in a call.

    facts : sizes of the call's tensors, and the replacements of its integers
    outputs : results of the call (nested `TensorSpec`)
    """
    if reads_places(slot.op, slot.argument, slot.dtype) and _fits_shapes(model, facts):
        return RedactedModel(model, PLACES)
    if isinstance(model, Exact):
        redacted = _sketch(model, slot, facts, outputs)
    else:
        coarsen = _COARSE.get(type(model))
        redacted = RedactedModel(None if coarsen is None else coarsen(model, facts.pinned))
    if redacted.model is None:
        return redacted
    try:
        redacted.model.check()
    except FormatError:
        # numbers of an untrusted file that cannot be made coarse
        return RedactedModel(None)
    return redacted


def _fits_shapes(model: ValueModel, facts: CallFacts) -> bool:
    """Return True if all numbers of a value model can be positions in the memory of the call."""
    match model:
        case Exact(data):
            numbers: list[Any] = list(data)
        case Offsets(first, last):
            numbers = [first, last]
        case _:
            return False
    return all(type(number) is int and abs(number) <= facts.extent for number in numbers)


def _sketch(model: Exact, slot: TensorSlot, facts: CallFacts, outputs: Any) -> RedactedModel:
    """Return a value model that replaces the exact values of a small tensor and makes the operator behave the same."""
    shape = slot.shape if prod(slot.shape) == len(model.data) else (len(model.data),)
    values = model.draw(shape, slot.dtype, torch.Generator())
    if _is_whole(values):
        whole = values.to(torch.int64)
        numbers = IntegerMap(whole.reshape(-1).tolist(), facts.pinned)
        values = torch.tensor([numbers[value] for value in whole.reshape(-1).tolist()]).reshape(shape)
        values = values.to(slot.dtype)
    sketch = _fit(values, requested_kinds(slot.op, slot.argument, slot.dtype))
    if sketch is None:
        return RedactedModel(None)
    sketch = _with_sum(sketch, values, slot, facts)
    sketch = refine_model(slot.op, slot.argument, sketch, outputs)
    if not sizes_outputs(slot.op, slot.argument, slot.dtype) or _decides_alike(sketch, slot):
        return RedactedModel(sketch)
    if "nms" in slot.op:
        return RedactedModel(model, GROUPED)
    flat = values.reshape(-1)
    return RedactedModel(Exact((_runs(flat) if values.dim() == 1 else _ranks(flat)).tolist()), ARRANGED)


def _fit(values: torch.Tensor, requested: frozenset[str]) -> ValueModel | None:
    with torch.no_grad():
        for kind in _SKETCHES:
            if _REQUESTED.get(kind, "") not in ("", *requested):
                continue
            model: Any = kind.fit(values)
            if model is not None:
                return _without_marks(_COARSE[kind](model, {}) if not _is_whole(values) else model, values)
    return None


def _without_marks(model: ValueModel, values: torch.Tensor) -> ValueModel:
    """Return the value model without its quantiles, because each quantile is an actual element of the tensor.

    A model of floats gets the number of distinct `values` instead.
    """
    match model:
        case Floats():
            distinct = len(set(map(str, values.reshape(-1).tolist()))) if not values.is_complex() else None
            shape = "uniform" if model.shape == "quantiles" else model.shape
            return replace(model, quantiles=None, shape=shape, distinct=distinct)
        case Boxes():
            return replace(model, quantiles=None)
    return model


def _with_sum(sketch: ValueModel, values: torch.Tensor, slot: TensorSlot, facts: CallFacts) -> ValueModel:
    """Return `sketch` with the sum of `values` if the argument holds lengths and their sum is a size in the call."""
    total = int(values.to(torch.int64).sum()) if isinstance(sketch, Integers) else None
    is_told = total in facts.sizes and slot.argument in LENGTHS
    return replace(sketch, total=total) if is_told and isinstance(sketch, Integers) else sketch


def _decides_alike(sketch: ValueModel, slot: TensorSlot) -> bool:
    """Return True if values drawn from a value model make the operator return outputs of the recorded sizes."""
    if "nms" in slot.op:
        return isinstance(sketch, Boxes) or prod(slot.shape[:1]) <= 1
    if isinstance(sketch, Booleans | Constant | Permutation):
        return True
    return "consecutive" not in slot.op and "unique_dim" not in slot.op


def _is_whole(values: torch.Tensor) -> bool:
    return not (values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool)


def _runs(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor of zeros and ones that has a change exactly where neighbouring values differ."""
    changes = (values[1:] != values[:-1]).to(torch.int64)
    runs = torch.cat([changes.new_zeros(1), changes.cumsum(0)]).remainder(2)
    return runs if _is_whole(values) else runs.double()


def _ranks(values: torch.Tensor) -> torch.Tensor:
    comparable = torch.view_as_real(values).sum(-1) if values.is_complex() else values
    ranks: torch.Tensor = comparable.unique(return_inverse=True)[1]
    return ranks if _is_whole(values) else ranks.double()


def _constant(model: Constant, pinned: Mapping[int, int]) -> Constant:
    value = model.value
    if isinstance(value, complex):
        return Constant(complex(coarse_float(value.real), coarse_float(value.imag)))
    return Constant(pinned[value] if type(value) is int and value in pinned else coarse(value))


def _one_hot(model: OneHot, pinned: Mapping[int, int]) -> OneHot:
    # the most frequent classes reveal the data and do not affect the time
    return replace(model, frequent=[[place, count] for place, (_, count) in enumerate(model.frequent)])


def _progression(model: Progression, pinned: Mapping[int, int]) -> Progression:
    last = model.start + model.step * (model.period - 1)
    low = min(model.start, last)
    step = coarse(model.step)
    low = coarse(low)
    return replace(model, start=low if step >= 0 else low - step * (model.period - 1), step=step)


def _permutation(model: Permutation, pinned: Mapping[int, int]) -> Permutation:
    low = coarse_int(model.low)
    return replace(
        model, low=low, high=low + model.high - model.low, step=None if model.step is None else coarse_float(model.step)
    )


def _offsets(model: Offsets, pinned: Mapping[int, int]) -> Offsets:
    first = coarse_int(model.first)
    if model.lengths is None or sum(count for _, count in model.lengths) == 1:
        last = first + coarse_int(model.last - model.first)
        quantiles = _coarse_floats(model.quantiles)
        lengths = None if model.lengths is None else [[last - first, 1]]
        return replace(model, first=first, last=last, quantiles=quantiles, lengths=lengths)
    numbers = IntegerMap((length for length, _ in model.lengths), pinned)
    lengths = [[numbers[length], count] for length, count in model.lengths]
    return replace(model, first=first, last=first + sum(length * count for length, count in lengths), lengths=lengths)


def _integers(model: Integers, pinned: Mapping[int, int]) -> Integers:
    bounds = [bound for bound in (model.low, model.high) if bound is not None]
    numbers = IntegerMap([*(value for value, _ in model.frequent), *bounds], pinned)
    frequent = [[numbers[value], count] for value, count in model.frequent]
    low, high = (None if bound is None else numbers[bound] for bound in (model.low, model.high))
    if low is not None and high is not None and model.low is not None and model.high is not None:
        others = max(1, (model.distinct or 1) - sum(count > 0 for _, count in model.frequent))
        # leave enough integers for as many distinct values as before
        high = max(high, low, min(low + others - 1, max(high, model.high)))
    return replace(
        model,
        frequent=frequent,
        low=low,
        high=high,
        step=None if model.step is None else coarse_float(model.step),
        zipf=round(model.zipf, 1),
    )


def _floats(model: Floats, pinned: Mapping[int, int]) -> Floats:
    redacted: Floats = _coarsened(model, "mean", "std", "low", "high", "quantiles", "step")
    return replace(redacted, mean=min(max(redacted.mean, redacted.low), redacted.high))


def _coarsened(model: Any, *names: str) -> Any:
    """Return a value model with the floats in the named fields rounded to their `BITS` leading bits."""
    return replace(model, **{name: _coarse_floats(getattr(model, name)) for name in names})


def _coarse_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_coarse_floats(item) for item in value]
    return None if value is None else coarse_float(value)


_COARSE: dict[type, Callable[[Any, Mapping[int, int]], ValueModel]] = {
    Booleans: lambda model, pinned: model,
    Boxes: lambda model, pinned: _coarsened(model, "low", "high", "quantiles", "overlap"),
    Constant: _constant,
    Factorable: lambda model, pinned: _coarsened(model, "diagonal", "spread"),
    Floats: _floats,
    Integers: _integers,
    Offsets: _offsets,
    OneHot: _one_hot,
    Permutation: _permutation,
    Probabilities: lambda model, pinned: _coarsened(model, "peak"),
    Progression: _progression,
    Triangular: lambda model, pinned: _coarsened(model, "low", "high", "spread"),
}
