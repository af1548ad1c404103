"""The least and the largest value of a tensor, which is all that an execution trace has of values."""

from __future__ import annotations

import json
from typing import Any

import torch

from opgrip.errors import FormatError
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.json_values import LIMIT
from opgrip.traces.schema.limits import check_nesting
from opgrip.traces.values import ValueModel
from opgrip.traces.values.exact import Constant, Exact
from opgrip.traces.values.integers import Integers
from opgrip.traces.values.offsets import Offsets
from opgrip.traces.values.order import Permutation
from opgrip.traces.values.progression import Progression

Range = tuple[int | float, int | float]


def range_of(model: ValueModel | None, spec: TensorSpec) -> Range | None:
    """The range of a model of whole numbers; None for all else."""
    if model is None or spec.dtype.is_floating_point or spec.dtype.is_complex:
        return None
    bounds: list[Any] = []
    match model:
        case Exact(data=data):
            bounds = data
        case Constant(value=value):
            bounds = [value]
        case Integers(frequent=frequent, low=low, high=high):
            bounds = [value for value, _ in frequent] + [bound for bound in (low, high) if bound is not None]
        case Permutation(low=low, high=high):
            bounds = [low, high]
        case Offsets(first=first, last=last):
            bounds = [first, last]
        case Progression(start=start, step=step, period=period):
            bounds = [start, start + step * (period - 1)]
    numbers = [int(item) for item in bounds if isinstance(item, int)]
    return (min(numbers), max(numbers)) if numbers and len(numbers) == len(bounds) else None


def parse_ranges(text: str) -> dict[int, Range]:
    """Ranges by the place of the tensor.

    Raises
    ------
    FormatError : for a text that is none
    """
    if not text:
        return {}
    try:
        form = json.loads(text)
        check_nesting(text.encode(), form)
        ranges = {int(place): (low, high) for place, (low, high) in form.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError("ranges of values that cannot be read") from error
    for low, high in ranges.values():
        if not all(type(bound) in (int, float) and -LIMIT <= bound < LIMIT for bound in (low, high)) or low > high:
            raise FormatError("ranges of values that cannot be read")
    return ranges


def model_of(span: Range, spec: TensorSpec) -> ValueModel | None:
    """A model of the values of a tensor of that range; None where none is known.

    Raises
    ------
    FormatError : for a range that values cannot have
    """
    low, high = span
    whole = type(low) is int and type(high) is int
    model: ValueModel
    if low == high and (whole or spec.dtype.is_floating_point):
        model = Constant(bool(low) if spec.dtype == torch.bool else low)
    elif whole and not (spec.dtype.is_floating_point or spec.dtype.is_complex) and 0 not in spec.shape:
        model = Integers([], int(low), int(high), torch.Size(spec.shape).numel(), ascending=False)
    else:
        return None
    model.check()
    return model
