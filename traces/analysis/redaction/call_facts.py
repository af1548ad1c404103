"""Facts of a call that redaction needs: its sizes, its tensors with value models, and the names of its arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.operator_arguments import schema_arguments
from opgrip.traces.schema.tensor_specs import Compressed, Coo, Nested, memory_dtype


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Facts about the numbers of a call that follow from its shapes.

    Attributes
    ----------
    sizes : sizes of all dimensions of arguments and results
    extent : the largest position in memory, or number of elements, of these tensors
    pinned : integers with their images elsewhere in the call; redacting its scalars adds their images
    """

    sizes: frozenset[int]
    extent: int
    pinned: dict[int, int]


def call_facts(sizes: Collection[int], extent: int, known: Mapping[int, int] | None = None) -> CallFacts:
    """Return the facts of a call with these sizes; images in `known` take precedence over the sizes."""
    pinned = {number: number for size in sizes for number in (size - 1, size) if number > 0}
    return CallFacts(frozenset(sizes), extent, pinned | dict(known or {}))


def facts_of(args: Any, outputs: Any) -> CallFacts:
    """Return the facts of a call with these arguments and outputs."""
    sizes: set[int] = set()
    extent = 0
    for spec in tensors([args, outputs]):
        for one in (spec, *spec.parts):
            sizes.update(one.shape)
            extent = max(extent, prod(one.shape), one.extent // max(1, one.dtype.itemsize))
    return call_facts(sizes, extent)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Tensor in a call that can have a value model.

    Attributes
    ----------
    number : number of its model, or None
    shape, dtype : shape and dtype of the values that the model draws
    """

    op: str
    argument: str
    number: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def slots_of(op: str, argument: str, spec: TensorSpec) -> Iterator[TensorSlot]:
    """Yield the tensors that a tensor consists of, in the order of `value_numbers`."""
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


def argument_name(op: str, place: int | str) -> tuple[str, str]:
    """Return an argument's name and type in the schema, or its position or keyword and an empty type without a schema
    entry.
    """
    parameters = schema_arguments(op)
    if isinstance(place, int):
        return parameters[place] if place < len(parameters) else (str(place), "")
    return place, dict(parameters).get(place, "")
