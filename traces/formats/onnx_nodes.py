"""A node of an ONNX graph, with the shapes and constants that the graph tells of it, and the calls that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from opgrip.cli.plugins import needed
from opgrip.errors import one_line
from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.tensor_specs import contiguous

MOST_NODES = 1_000_000
"""Of a model whose functions stand where they are called: thirty functions that call each other twice are a billion."""
MOST_DEPTH = 200
"""Functions that call each other, one inside of the other, and graphs within graphs."""

Key = tuple[str, str, str]


class _TooMany(ValueError):
    """That functions call each other without end, or too often."""


def inlined(model: Any, losses: Losses) -> Any:
    """The model without functions; where they go beyond the bounds, calls of them stay what no operator is for."""
    functions = {_key(item, item.name): item for item in model.functions}
    try:
        _check(model.graph.node, functions)
        return needed("onnx.inliner", "onnx").inline_local_functions(model)
    except Exception as error:
        # onnx has errors of many kinds for a model that is wrong
        losses.defaults.append(f"functions of the model: not followed ({one_line(error, 100)})")
    # inference would go through their bodies
    del model.functions[:]
    return model


def _check(nodes: Iterable[Any], functions: dict[Key, Any]) -> None:
    sizes: dict[Key, int] = {}
    running: set[Key] = set()

    def size_of(nodes: Iterable[Any], depth: int) -> int:
        if depth > MOST_DEPTH:
            raise _TooMany("they nest too deep")
        total = 0
        for node in nodes:
            key = _key(node, node.op_type)
            total += size_of_function(key, depth) if key in functions else 1
            total += sum(size_of(graph.node, depth + 1) for graph in _graphs(node))
            if total > MOST_NODES:
                raise _TooMany(f"they are more than {MOST_NODES:,} nodes")
        return total

    def size_of_function(key: Key, depth: int) -> int:
        if key in running:
            raise _TooMany("one calls itself")
        if key not in sizes:
            running.add(key)
            sizes[key] = size_of(functions[key].node, depth + 1)
            running.remove(key)
        return sizes[key]

    size_of(nodes, 0)


def _key(item: Any, name: str) -> Key:
    # onnx has two names for its own domain
    return "" if item.domain == "ai.onnx" else item.domain, name, getattr(item, "overload", "")


def _graphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


class NoOperator(ValueError):
    """That torch has no operator for a node, by the reason."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a node, or a part of it, becomes.

    Attributes
    ----------
    op : of aten, with its overload: `add.Tensor`
    outputs : one, a tuple, or a list of them
    """

    op: str
    args: tuple[Any, ...]
    outputs: Any
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Node:
    """A node.

    Attributes
    ----------
    inputs : None for one that is left out
    outputs : None for one that nobody takes
    constants : of each input the values in their order, None where the graph does not tell them, or there are many
    opset : version of the operators of ONNX that the model is written in
    between : the memory of a value between two calls of this node
    """

    op: str
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec | None, ...]
    constants: tuple[list[Any] | None, ...]
    attributes: dict[str, Any]
    opset: int
    between: Callable[[], int]

    @property
    def x(self) -> TensorSpec:
        """The first input."""
        return self.input(0)

    @property
    def out(self) -> TensorSpec:
        """The first output."""
        if not self.outputs or self.outputs[0] is None:
            raise NoOperator("nobody takes what it gives")
        return self.outputs[0]

    @property
    def rank(self) -> int:
        """Of the first input."""
        return len(self.x.shape)

    def has(self, place: int) -> bool:
        """Whether an input is there."""
        return place < len(self.inputs) and self.inputs[place] is not None

    def input(self, place: int) -> TensorSpec:
        """An input that has to be there."""
        value = self.inputs[place] if place < len(self.inputs) else None
        if value is None:
            raise NoOperator("it lacks an input")
        return value

    def optional(self, place: int) -> TensorSpec | None:
        """An input that may be left out."""
        return self.inputs[place] if place < len(self.inputs) else None

    def get(self, name: str, default: Any) -> Any:
        """An attribute, of the default's type."""
        value = self.attributes.get(name, default)
        if type(value) is not type(default) and not (value is None or default is None):
            raise NoOperator(f"its attribute {name} is of another type")
        return value

    def numbers(self, name: str, place: int) -> list[Any] | None:
        """Numbers that older versions have as an attribute and newer ones as an input; None where they are left out.

        Raises
        ------
        NoOperator : where they are computed
        """
        if name in self.attributes:
            value = self.attributes[name]
            return list(value) if isinstance(value, list) else [value]
        if not self.has(place):
            return None
        values = self.constants[place]
        if values is None:
            raise NoOperator(f"its {name} are computed")
        return list(values)

    def whole(self, name: str, place: int) -> list[int] | None:
        """The same, of whole numbers."""
        values = self.numbers(name, place)
        if values is not None and not all(type(value) is int and abs(value) <= 1 << 63 for value in values):
            raise NoOperator(f"its {name} are no whole numbers")
        return values

    def axis(self, default: int, name: str = "axis") -> int:
        """A dimension of the first input, from 0 on."""
        value = int(self.get(name, default))
        if not -self.rank <= value < max(self.rank, 1):
            raise NoOperator("a dimension that is not there")
        return value % max(self.rank, 1)

    def spatial(self, name: str, default: int) -> list[int]:
        """An attribute of a number for each dimension after batch and channels."""
        count = self.rank - 2
        if count not in (1, 2, 3):
            raise NoOperator(f"of {count} spatial dimensions")
        values: list[int] = self.get(name, [default] * count)
        if len(values) != count:
            raise NoOperator(f"its {name} are of other dimensions")
        return values

    def step(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> TensorSpec:
        """A value between two calls of this node."""
        return tensor(shape, dtype or self.x.dtype, self.between())


def tensor(shape: tuple[int, ...], dtype: torch.dtype, storage: int | None) -> TensorSpec:
    """A contiguous tensor on the processor."""
    return TensorSpec(shape, contiguous(shape), dtype, "cpu", storage=storage)


def transposed(spec: TensorSpec) -> TensorSpec:
    """The same memory, its last two dimensions exchanged."""
    assert spec.stride is not None, "it is strided"
    if len(spec.shape) < 2:
        raise NoOperator("the transpose of a vector")
    *rest, rows, columns = range(len(spec.shape))
    order = (*rest, columns, rows)
    shape, stride = (tuple(sizes[place] for place in order) for sizes in (spec.shape, spec.stride))
    return replace(spec, shape=shape, stride=stride)


def call(node: Node, op: str, *args: Any, outputs: Any = None, **kwargs: Any) -> list[Call]:
    """A node that is one call; its output is the node's first unless another is named."""
    return [Call(op, args, node.out if outputs is None else outputs, kwargs)]
