"""What a call says by itself: its shapes, and what its arguments are called."""

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
    """What the shapes of a call say about the numbers in it.

    Attributes
    ----------
    sizes : of all dimensions of its arguments and results
    extent : the largest position in memory, or count of elements, among them
    pinned : integers and their images elsewhere in the call; redacting its scalars adds theirs
    """

    sizes: frozenset[int]
    extent: int
    pinned: dict[int, int]


def call_facts(sizes: Collection[int], extent: int, known: Mapping[int, int] | None = None) -> CallFacts:
    """Return the facts of a call with such sizes; `known` images take precedence over those of the sizes."""
    pinned = {number: number for size in sizes for number in (size - 1, size) if number > 0}
    return CallFacts(frozenset(sizes), extent, pinned | dict(known or {}))


def facts_of(args: Any, outputs: Any) -> CallFacts:
    """Return what the shapes of a call say."""
    sizes: set[int] = set()
    extent = 0
    for spec in tensors([args, outputs]):
        for one in (spec, *spec.parts):
            sizes.update(one.shape)
            extent = max(extent, prod(one.shape), one.extent // max(1, one.dtype.itemsize))
    return call_facts(sizes, extent)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor in a call that can have a value model.

    Attributes
    ----------
    number : number of its model, or None
    shape, dtype : of the values that the model draws
    """

    op: str
    argument: str
    number: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def slots_of(op: str, argument: str, spec: TensorSpec) -> Iterator[TensorSlot]:
    """Yield the tensors that one is made of, in the order of `value_numbers`."""
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
    """Return the schema's name and type of an argument; its position or keyword, and no type, if no schema has it."""
    parameters = schema_arguments(op)
    if isinstance(place, int):
        return parameters[place] if place < len(parameters) else (str(place), "")
    return place, dict(parameters).get(place, "")
