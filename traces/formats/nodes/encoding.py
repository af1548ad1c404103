"""Arguments and results of a call as what goes into a node, and comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch

from opgrip.traces.formats.nodes.codes import DTYPE_CODES, ELEMENT_NAMES, LAYOUT_CODES, MEMORY_FORMAT_CODES
from opgrip.traces.formats.nodes.decoding import UNDEFINED
from opgrip.traces.formats.nodes.json_nodes import NONE, Port
from opgrip.traces.schema.arguments import GeneratorSpec, TensorSpec
from opgrip.traces.schema.torch_names import plain_name

Range = tuple[int | float, int | float]


class Identities(Protocol):
    """Numbers of a call's tensors, and of the storages that they lie in."""

    def of(self, spec: TensorSpec) -> tuple[int, int]:
        """Those of the next of the call's tensors."""

    def new(self) -> int:
        """A number that nothing has."""


NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""The dtypes of tensors that numbers are made into."""


@dataclass(frozen=True, slots=True)
class Item:
    """One value of a port: what stands in each of its lists."""

    value: Any
    shape: Any
    type: str
    stride: Any


@dataclass(slots=True)
class Encoder:
    """Makes ports.

    Attributes
    ----------
    identities : gives tensors their numbers
    range_of : the least and the largest value of a tensor, where they are known
    lose : is told what a port cannot hold
    ranges : of the tensors of the ports that were made, by their place among them
    """

    identities: Identities
    range_of: Callable[[TensorSpec], Range | None]
    lose: Callable[[str], None]
    ranges: dict[int, Range] = field(default_factory=dict)
    _tensors: int = 0

    def port(self, values: Sequence[Any], kinds: Sequence[str], are_results: bool = False) -> Port:
        """The port of arguments, or of results.

        Parameters
        ----------
        kinds : what the schema says of each, `Tensor?`
        """
        columns = zip(values, kinds, strict=True)
        items = [
            self._undefined() if are_results and value is None else self._item(value, kind) for value, kind in columns
        ]
        return Port(
            [item.value for item in items],
            [item.shape for item in items],
            [item.type for item in items],
            [item.stride for item in items],
        )

    def _item(self, value: Any, kind: str) -> Item:
        match value:
            case TensorSpec():
                return self._tensor(value)
            case list() | tuple():
                return self._list(value, kind)
            case None:
                return Item(NONE, [], "None", [])
            case bool() | int() | float() | complex() if kind.startswith("Tensor"):
                return self._number(value)
            case bool():
                return Item(value, [], "Bool", [])
            case int() if kind.rstrip("?") != "float":
                return Item(value, [], "Int", [])
            case int() | float():
                return Item(_float(float(value)), [], "Double", [])
            case str():
                return Item(value, [], "String", [])
        return self._code(value)

    def _code(self, value: Any) -> Item:
        """What is a number there, or cannot be told."""
        match value:
            case torch.dtype() if value in DTYPE_CODES:
                return Item(DTYPE_CODES[value], [], "Int", [])
            case torch.layout() if value in LAYOUT_CODES:
                return Item(LAYOUT_CODES[value], [], "Int", [])
            case torch.memory_format() if value in MEMORY_FORMAT_CODES:
                return Item(MEMORY_FORMAT_CODES[value], [], "Int", [])
            case torch.device():
                return Item(str(value), [], "Device", [])
            case complex():
                name = "ComplexDouble"
            case GeneratorSpec():
                name = "Generator"
            case _:
                name = "Object"
        self.lose(f"its argument of type {name if name != 'Object' else type(value).__name__}")
        return Item(f"<{name}>", [], name, [])

    def _list(self, value: Sequence[Any], kind: str) -> Item:
        inner = kind.rstrip("?").removesuffix("[]")
        items = [self._item(item, inner) for item in value]
        return Item(
            [item.value for item in items],
            [item.shape for item in items],
            f"GenericList[{','.join(item.type for item in items)}]",
            [item.stride for item in items],
        )

    def _tensor(self, spec: TensorSpec) -> Item:
        if spec.stride is None:
            self.lose(f"that a tensor is {plain_name(spec.layout)}")
        if spec.conj or spec.neg:
            self.lose("that a tensor is conjugated or negated")
        span = self.range_of(spec)
        if span is not None:
            self.ranges[self._tensors] = span
        return self._described(spec, *self.identities.of(spec))

    def _described(self, spec: TensorSpec, tensor: int, storage: int) -> Item:
        self._tensors += 1
        value = [tensor, storage, spec.offset, prod(spec.shape), spec.dtype.itemsize, spec.device]
        name = ELEMENT_NAMES.get(spec.dtype, f"c10::{plain_name(spec.dtype)}")
        return Item(value, list(spec.shape), f"Tensor({name})", list(spec.stride or ()))

    def _number(self, value: bool | int | float | complex) -> Item:
        """A number where the operator takes a tensor, as torch's observer has it; its range is its value."""
        if isinstance(value, complex) or not math.isfinite(value):
            self.lose("the value of a number that stands for a tensor")
        else:
            self.ranges[self._tensors] = (value, value)
        spec = TensorSpec((), (), NUMBERS[type(value)], "cpu")
        return self._described(spec, self.identities.new(), self.identities.new())

    def _undefined(self) -> Item:
        """A result that there is none of."""
        return Item([self.identities.new(), 0, 0, 0, 0, ""], [], f"Tensor({UNDEFINED})", [])


def _float(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
