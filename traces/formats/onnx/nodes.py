"""Nodes of an ONNX graph with their shapes and constants, inlining of a model's functions, and computation of sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from opgrip.cli.plugins import needed
from opgrip.errors import one_line
from opgrip.traces.io.foreign_files import Losses
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.tensor_specs import contiguous

MOST_ELEMENTS = 1024
MOST_INPUTS = 64  # maximum number of inputs of a computed constant
MOST_NUMBER = 1 << 62

Numbers = list[Any]
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
# function that computes an output's values from the inputs' values and the attributes
Fold = Callable[[list[Numbers], Mapping[str, Any]], Numbers]


def complete(
    nodes: Any, shapes: Shapes, constants: dict[str, Numbers], read: Callable[[Any], Any], infer: Callable[..., Shapes]
) -> None:
    """Compute further shapes and small constants from the known ones, and add them to `shapes` and `constants`."""
    for node in nodes:
        if node.domain not in ("", "ai.onnx") or node.op_type == "Constant":
            continue
        _fold(node, shapes, constants, read)
        names = [name for name in node.input if name]
        if any(name and name not in shapes for name in node.output) and all(name in shapes for name in names):
            for name, shape in infer(node, shapes, constants).items():
                shapes.setdefault(name, shape)


def _fold(node: Any, shapes: Shapes, constants: dict[str, Numbers], read: Callable[[Any], Any]) -> None:
    attributes = {item.name: read(item) for item in node.attribute}
    if len(node.output) != 1 or node.output[0] in constants or not 0 < len(node.input) <= MOST_INPUTS:
        return
    values: Numbers | None = None
    if node.op_type == "Shape" and node.input[0] in shapes:
        values = list(shapes[node.input[0]][1])[attributes.get("start", 0) : attributes.get("end", MOST_NUMBER)]
    elif node.op_type in FOLDS and all(name in constants for name in node.input):
        if any(len(shapes.get(name, (None, ()))[1]) > 1 for name in node.input):
            return
        try:
            values = FOLDS[node.op_type]([constants[name] for name in node.input], attributes)
        except (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError):
            return
    if (
        values is not None
        and len(values) <= MOST_ELEMENTS
        and all(isinstance(value, int | float) and abs(value) < MOST_NUMBER for value in values)
    ):
        constants[node.output[0]] = values


def _gather(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    data, indices = inputs
    return [data[index] for index in indices]


def _slice(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    data, (start,), (end,), *rest = inputs
    step = rest[1][0] if len(rest) > 1 else 1
    return data[start:end:step]


def _cast(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    # 6 and 7 are integers of 32 and 64 bits; other types keep their values
    return [int(value) for value in inputs[0]] if attributes.get("to") in (6, 7) else inputs[0]


def _range(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    (start,), (end,), (step,) = inputs
    indices = range(start, end, step)
    if len(indices) > MOST_ELEMENTS:
        raise ValueError(f"a range of more than {MOST_ELEMENTS:,} elements")
    return list(indices)


def _full(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
    count = prod(inputs[0])
    if len(inputs[0]) > 1 or not 0 <= count <= MOST_ELEMENTS:
        raise ValueError(f"a constant that has several dimensions, or more than {MOST_ELEMENTS:,} elements")
    return [(attributes.get("value") or [0.0])[0]] * count


def _each(function: Callable[..., Any]) -> Fold:
    def fold(inputs: list[Numbers], attributes: Mapping[str, Any]) -> Numbers:
        length = max(map(len, inputs))
        rows = [values * length if len(values) == 1 else values for values in inputs]
        return [function(*items) for items in zip(*rows, strict=True)]

    return fold


def _quotient(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        # towards zero, unlike Python's
        quotient = abs(left) // abs(right)
        return quotient if (left < 0) == (right < 0) else -quotient
    return left / right


FOLDS: dict[str, Fold] = {
    **dict.fromkeys(("Identity", "Reshape", "Squeeze", "Unsqueeze"), lambda inputs, attributes: inputs[0]),
    "Add": _each(lambda left, right: left + right),
    "Cast": _cast,
    "Concat": lambda inputs, attributes: [value for values in inputs for value in values],
    "ConstantOfShape": _full,
    "Div": _each(_quotient),
    "Equal": _each(lambda left, right: left == right),
    "Gather": _gather,
    "Max": _each(max),
    "Min": _each(min),
    "Mod": _each(lambda left, right: left % right),
    "Mul": _each(lambda left, right: left * right),
    "Neg": _each(lambda value: -value),
    "Range": _range,
    "Slice": _slice,
    "Sub": _each(lambda left, right: left - right),
    "Where": _each(lambda condition, left, right: left if condition else right),
}


# maximum number of nodes after inlining: thirty functions that each call the next one twice would make a billion nodes
MOST_NODES = 1_000_000
MOST_DEPTH = 200  # maximum depth of nested function calls and graphs

Key = tuple[str, str, str]


class _TooMany(ValueError):
    pass


def inlined(model: Any, losses: Losses) -> Any:
    """Return the model with the calls of its functions replaced by the functions' nodes, if that is possible."""
    functions = {_key(item, item.name): item for item in model.functions}
    try:
        _check(model.graph.node, functions)
        return needed("onnx.inliner", "onnx").inline_local_functions(model)
    except Exception as error:
        # onnx raises many types of errors for an invalid model
        losses.defaults.append(f"functions of the model: not replaced by their nodes ({one_line(error, 100)})")
    # shape inference would enter their bodies
    del model.functions[:]
    return model


def _check(nodes: Iterable[Any], functions: dict[Key, Any]) -> None:
    sizes: dict[Key, int] = {}
    running: set[Key] = set()

    def size_of(nodes: Iterable[Any], depth: int) -> int:
        if depth > MOST_DEPTH:
            raise _TooMany(f"its subgraphs and functions are nested more than {MOST_DEPTH} levels deep")
        total = 0
        for node in nodes:
            key = _key(node, node.op_type)
            total += size_of_function(key, depth) if key in functions else 1
            total += sum(size_of(graph.node, depth + 1) for graph in _graphs(node))
            if total > MOST_NODES:
                raise _TooMany(f"they contain more than {MOST_NODES:,} nodes")
        return total

    def size_of_function(key: Key, depth: int) -> int:
        if key in running:
            raise _TooMany(f"the function {key[1][:60]} calls itself")
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
    pass


@dataclass(frozen=True, slots=True)
class OnnxCall:
    op: str
    args: tuple[Any, ...]
    outputs: Any
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """A node with the shapes of its inputs and outputs, and with known constants.

    inputs : tensors, None for an omitted input
    outputs : tensors, None for an unused output
    constants : values of each input, None if unknown or too many
    between : returns a new storage number for a value that one call of this node passes to another
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
        return self.input(0)

    @property
    def out(self) -> TensorSpec:
        if not self.outputs or self.outputs[0] is None:
            raise NoOperator("its first output is unused, so its shape is unknown")
        return self.outputs[0]

    @property
    def rank(self) -> int:
        return len(self.x.shape)

    def has(self, index: int) -> bool:
        return index < len(self.inputs) and self.inputs[index] is not None

    def input(self, index: int) -> TensorSpec:
        value = self.inputs[index] if index < len(self.inputs) else None
        if value is None:
            raise NoOperator(f"its input {index} is missing")
        return value

    def all_inputs(self) -> list[TensorSpec]:
        return [self.input(index) for index in range(len(self.inputs))]

    @property
    def keeps_dimensions(self) -> bool:
        return bool(self.get("keepdims", 1))

    def optional(self, index: int) -> TensorSpec | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def get(self, name: str, default: Any) -> Any:
        value = self.attributes.get(name, default)
        if type(value) is not type(default) and not (value is None or default is None):
            raise NoOperator(f"its attribute {name} has the type {type(value).__name__}, not {type(default).__name__}")
        return value

    def numbers(self, name: str, index: int) -> list[Any] | None:
        """Return the numbers in attribute `name` (older ONNX versions) or input `index` (newer ones)."""
        if name in self.attributes:
            value = self.attributes[name]
            return list(value) if isinstance(value, list) else [value]
        if not self.has(index):
            return None
        values = self.constants[index]
        if values is None:
            raise NoOperator(f"its {name} are data-dependent")
        return list(values)

    def whole(self, name: str, index: int) -> list[int] | None:
        values = self.numbers(name, index)
        if values is not None and not all(type(value) is int and abs(value) <= 1 << 63 for value in values):
            raise NoOperator(f"its {name} are not integers")
        return values

    def axis(self, default: int, name: str = "axis") -> int:
        value = int(self.get(name, default))
        if not -self.rank <= value < max(self.rank, 1):
            raise NoOperator(f"its {name} is {value}, but its input has {self.rank} dimensions")
        return value % max(self.rank, 1)

    def spatial(self, name: str, default: int) -> list[int]:
        count = self.rank - 2
        if count not in (1, 2, 3):
            raise NoOperator(f"unsupported: {count} spatial dimensions")
        values: list[int] = self.get(name, [default] * count)
        if len(values) != count:
            raise NoOperator(f"its {name} have {len(values)} elements for {count} spatial dimensions")
        return values

    def step(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> TensorSpec:
        return tensor(shape, dtype or self.x.dtype, self.between())


def tensor(shape: tuple[int, ...], dtype: torch.dtype, storage: int | None) -> TensorSpec:
    return TensorSpec(shape, contiguous(shape), dtype, "cpu", storage=storage)


def transposed(spec: TensorSpec) -> TensorSpec:
    assert spec.stride is not None, "it is strided"
    if len(spec.shape) < 2:
        raise NoOperator("unsupported: transposition of a tensor with fewer than two dimensions")
    *rest, rows, columns = range(len(spec.shape))
    order = (*rest, columns, rows)
    shape, stride = (tuple(sizes[index] for index in order) for sizes in (spec.shape, spec.stride))
    return replace(spec, shape=shape, stride=stride)


def call(node: OnnxNode, op: str, *args: Any, outputs: Any = None, **kwargs: Any) -> list[OnnxCall]:
    return [OnnxCall(op, args, node.out if outputs is None else outputs, kwargs)]
