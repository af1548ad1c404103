"""What a call tells by itself: its shapes, and what its arguments are called."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from opgrip.traces.schema.arguments import TensorSpec, tensors
from opgrip.traces.schema.operator_arguments import schema_arguments
from opgrip.traces.schema.records import FUNCTION
from opgrip.traces.schema.tensor_specs import Compressed, Coo, Nested, memory_dtype

VALUE_TYPES = ("number", "float", "complex", "Scalar")
"""In a schema, types of arguments that are values, where those of type `int` are sizes, dimensions and flags."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What the shapes of a call tell of the numbers in it.

    Attributes
    ----------
    sizes : of all dimensions of the tensors that it takes and gives
    extent : the largest place in memory, or count of elements, among them
    pinned : whole numbers and what they become elsewhere in the call, which the shapes tell; its scalars are added
        while its arguments are redacted
    """

    sizes: frozenset[int]
    extent: int
    pinned: dict[int, int]


def call_facts(sizes: Collection[int], extent: int, known: Mapping[int, int] | None = None) -> CallFacts:
    """The facts of a call with such sizes.

    Parameters
    ----------
    known : images of whole numbers, which come before what the sizes tell
    """
    told = {number: number for size in sizes for number in (size - 1, size) if number > 0}
    return CallFacts(frozenset(sizes), extent, told | dict(known or {}))


def facts_of(args: Any, outputs: Any) -> CallFacts:
    """What the shapes of a call tell."""
    sizes: set[int] = set()
    extent = 0
    for spec in tensors([args, outputs]):
        for one in (spec, *spec.parts):
            sizes.update(one.shape)
            extent = max(extent, prod(one.shape), one.extent // max(1, one.dtype.itemsize))
    return call_facts(sizes, extent)


def argument_name(op: str, place: int | str) -> tuple[str, str]:
    """The name and the type of an argument; of one that no schema tells of its place or keyword, and nothing."""
    parameters = schema_arguments(op)
    if isinstance(place, int):
        return parameters[place] if place < len(parameters) else (str(place), "")
    return place, dict(parameters).get(place, "")


def is_value(op: str, kind: str, type_name: str) -> bool:
    """Whether a number in an argument of such a type is a value, which does not decide shapes."""
    # what an extension's function or an unknown operator does with a whole number is not known: it may be a size
    return kind == FUNCTION or any(name in type_name for name in VALUE_TYPES)


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor in a call that has a value model.

    Attributes
    ----------
    number : of its model; None where it has none
    shape, dtype : of the values that the model draws
    """

    op: str
    argument: str
    number: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def slots_of(op: str, argument: str, spec: TensorSpec) -> Iterator[Slot]:
    """The tensors that one is made of, in the order of `value_numbers`."""
    match spec.made_of:
        case Coo(indices, rows, values):
            for number in rows:
                yield Slot(op, argument, number, tuple(indices.shape[1:]), torch.int64)
            yield _slot(op, argument, values)
        case Compressed() | Nested():
            for part in spec.parts:
                yield _slot(op, argument, part)
        case _:
            yield _slot(op, argument, spec)


def _slot(op: str, argument: str, spec: TensorSpec) -> Slot:
    return Slot(op, argument, spec.values, spec.shape, memory_dtype(spec.dtype))
