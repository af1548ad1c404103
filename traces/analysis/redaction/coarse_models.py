"""Coarse numbers and value models that preserve an operator's time and the sizes of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import frexp, isfinite, ldexp, prod, trunc
from typing import Any

import torch

from opgrip.errors import FormatError
from opgrip.traces.analysis.redaction.call_facts import CallFacts, TensorSlot
from opgrip.traces.values import ValueModel, reads_places, refine_model, requested_kinds, sizes_outputs
from opgrip.traces.values.booleans import Booleans, OneHot
from opgrip.traces.values.boxes import Boxes
from opgrip.traces.values.distribution import Probabilities
from opgrip.traces.values.exact import Constant, Exact
from opgrip.traces.values.floats import Floats
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.matrices import Factorable, Triangular
from opgrip.traces.values.order import Permutation
from opgrip.traces.values.progression import Offsets, Progression

BITS = 3
"""number of leading bits that a coarse number keeps"""
LARGEST = (1 << 63) - 1


def coarse_int(value: int) -> int:
    """Return an integer with only its leading bits, rounded towards zero so that valid indices stay valid."""
    size = abs(value)
    dropped = max(0, size.bit_length() - BITS)
    size = size >> dropped << dropped
    return size if value >= 0 else -size


def coarse_float(value: float) -> float:
    """Return a float with only its leading bits; zero, infinities and nan stay."""
    if not isfinite(value) or not value:
        return value
    mantissa, exponent = frexp(value)
    # an integer number of eighths, which a float of any width can hold
    return ldexp(trunc(mantissa * (1 << BITS)) / (1 << BITS), exponent)


def coarse(value: int | float) -> int | float:
    """Return a coarse number; a boolean stays."""
    if isinstance(value, bool):
        return value
    return coarse_int(value) if isinstance(value, int) else coarse_float(value)


def rounded_up(value: int) -> int:
    """Return the next power of two, limited to 64 bits."""
    size = min(LARGEST, 1 << (abs(value) - 1).bit_length())
    return size if value >= 0 else -size


class IntegerMap:
    """Map of integers to others of no larger magnitude, in the same order, with the same signs and similar sizes.

    Each power of two has as many as before, at equal distances. So equal numbers stay equal, different ones different,
    sorted ones sorted, zeros zero, and indices valid.

    Parameters
    ----------
    pinned : numbers with a known image, from the call's shapes or scalars
    """

    def __init__(self, values: Iterable[int], pinned: Mapping[int, int] | None = None) -> None:
        pinned = pinned or {}
        distinct = set(values)
        self._images = {value: pinned[value] for value in distinct & pinned.keys()}
        taken = set(self._images.values())
        for sign in (1, -1):
            sizes = sorted(sign * value for value in distinct - self._images.keys() if sign * value > 0)
            self._spread(sizes, sign, {sign * image for image in taken})
        if 0 in distinct:
            self._images.setdefault(0, 0)

    def __getitem__(self, value: int) -> int:
        return self._images[value]

    def _spread(self, sizes: list[int], sign: int, taken: set[int]) -> None:
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
                while image in taken:
                    image += 1
                # pinned numbers can fill the range: two numbers then share an image
                before = image if image <= max(top, last) else low
                self._images[size * sign] = before * sign


PLACES = "sizes and places in memory: others lead out of it"
ARRANGED = "the order of equal values decides the outputs' sizes: other values in that order"
GROUPED = "how boxes overlap decides how many are kept, and these are too few for a model"
"""reasons why values, or their order, stay"""
LENGTHS = ("repeats", "lengths", "input_lengths", "target_lengths")
"""arguments whose elements add up to a size"""

_SKETCHES: tuple[Any, ...] = (
    *(Factorable, Triangular, Constant, OneHot, Booleans, Permutation, Probabilities, Boxes, Integers, Floats),
)
"""models that can replace the values of a small tensor, in the order in which they are tried"""
_REQUESTED = {Factorable: "factorable", Triangular: "triangular", Boxes: "boxes", Probabilities: "probabilities"}
"""models that only some arguments may get; fitted to few values, they reveal more than other models"""


@dataclass(frozen=True, slots=True)
class RedactedModel:
    """Redacted value model.

    Attributes
    ----------
    model : None if no part of the model can stay
    kept : why values or their order stayed; empty if they did not
    """

    model: ValueModel | None
    kept: str = ""


def redact_model(model: ValueModel, slot: TensorSlot, facts: CallFacts, outputs: Any) -> RedactedModel:
    """Return the redacted model of a tensor in a call; `outputs` is the call's tree of `TensorSpec`."""
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
    """Return True if all numbers of a model can be positions in the memory of the call."""
    match model:
        case Exact(data):
            numbers: list[Any] = list(data)
        case Offsets(first, last):
            numbers = [first, last]
        case _:
            return False
    return all(type(number) is int and abs(number) <= facts.extent for number in numbers)


def _sketch(model: Exact, slot: TensorSlot, facts: CallFacts, outputs: Any) -> RedactedModel:
    """Return a model that replaces the values of a small tensor."""
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
    """Return the model with the number of distinct values but without quantiles, since these are single values."""
    match model:
        case Floats():
            distinct = len(set(map(str, values.reshape(-1).tolist()))) if not values.is_complex() else None
            shape = "uniform" if model.shape == "quantiles" else model.shape
            return replace(model, quantiles=None, shape=shape, distinct=distinct)
        case Boxes():
            return replace(model, quantiles=None)
    return model


def _with_sum(sketch: ValueModel, values: torch.Tensor, slot: TensorSlot, facts: CallFacts) -> ValueModel:
    """Return a sketch with the sum of the values if they are lengths that add up to a size of the call."""
    total = int(values.to(torch.int64).sum()) if isinstance(sketch, Integers) else None
    is_told = total in facts.sizes and slot.argument in LENGTHS
    return replace(sketch, total=total) if is_told and isinstance(sketch, Integers) else sketch


def _decides_alike(sketch: ValueModel, slot: TensorSlot) -> bool:
    """Return True if values drawn from a sketch lead to outputs of the recorded sizes."""
    if "nms" in slot.op:
        return isinstance(sketch, Boxes) or prod(slot.shape[:1]) <= 1
    if isinstance(sketch, Booleans | Constant | Permutation):
        return True
    return "consecutive" not in slot.op and "unique_dim" not in slot.op


def _is_whole(values: torch.Tensor) -> bool:
    return not (values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool)


def _runs(values: torch.Tensor) -> torch.Tensor:
    """Return zeros and ones that change wherever the values change."""
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
    return replace(model, low=low, high=low + model.high - model.low, step=_step(model.step))


def _offsets(model: Offsets, pinned: Mapping[int, int]) -> Offsets:
    first = coarse_int(model.first)
    if model.lengths is None or sum(count for _, count in model.lengths) == 1:
        last = first + coarse_int(model.last - model.first)
        quantiles = None if model.quantiles is None else [coarse_float(mark) for mark in model.quantiles]
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
    return replace(model, frequent=frequent, low=low, high=high, step=_step(model.step), zipf=round(model.zipf, 1))


def _probabilities(model: Probabilities, pinned: Mapping[int, int]) -> Probabilities:
    return replace(model, peak=coarse_float(model.peak))


def _boxes(model: Boxes, pinned: Mapping[int, int]) -> Boxes:
    levels = model.quantiles
    return replace(
        model,
        low=[coarse_float(value) for value in model.low],
        high=[coarse_float(value) for value in model.high],
        quantiles=None if levels is None else [[coarse_float(value) for value in marks] for marks in levels],
        overlap=None if model.overlap is None else coarse_float(model.overlap),
    )


def _floats(model: Floats, pinned: Mapping[int, int]) -> Floats:
    low, high = coarse_float(model.low), coarse_float(model.high)
    return replace(
        model,
        mean=min(max(coarse_float(model.mean), low), high),
        std=coarse_float(model.std),
        low=low,
        high=high,
        quantiles=None if model.quantiles is None else [coarse_float(value) for value in model.quantiles],
        step=_step(model.step),
    )


def _factorable(model: Factorable, pinned: Mapping[int, int]) -> Factorable:
    return replace(model, diagonal=coarse_float(model.diagonal), spread=coarse_float(model.spread))


def _triangular(model: Triangular, pinned: Mapping[int, int]) -> Triangular:
    low, high, spread = map(coarse_float, (model.low, model.high, model.spread))
    return replace(model, low=low, high=high, spread=spread)


def _step(step: float | None) -> float | None:
    return None if step is None else coarse_float(step)


_COARSE: dict[type, Callable[[Any, Mapping[int, int]], ValueModel]] = {
    Booleans: lambda model, pinned: model,
    Boxes: _boxes,
    Constant: _constant,
    Factorable: _factorable,
    Floats: _floats,
    Integers: _integers,
    Offsets: _offsets,
    OneHot: _one_hot,
    Permutation: _permutation,
    Probabilities: _probabilities,
    Progression: _progression,
    Triangular: _triangular,
}
