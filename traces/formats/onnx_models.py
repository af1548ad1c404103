"""Reader of an ONNX model as the trace of one run: each node becomes equivalent calls of aten operators."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite, prod
from typing import Any

import numpy as np
import torch

from opgrip.cli.plugins import needed
from opgrip.errors import UserError, one_line
from opgrip.traces.formats.building import NO_GRADIENTS, NO_TIMES, NO_VALUES, RecordBuilder, split
from opgrip.traces.formats.onnx_operators import REASONS, TABLE, OnnxNode, tensor
from opgrip.traces.formats.operator_schemas import Bound, NotConverted, bind, schemas_of
from opgrip.traces.formats.protobuf_files import has_more_fields
from opgrip.traces.io.foreign_files import ForeignFile, Format, Losses, formats
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, tensors
from opgrip.traces.schema.json_values import LIMIT
from opgrip.traces.schema.records import Record, Scope
from opgrip.traces.schema.tensor_specs import DTYPES, plain_name
from opgrip.traces.values.exact import MAX_ELEMENTS, Exact

OPEN_BATCH, OPEN_SIZE = 1, 64
MOST_CONSTANT = 1024  # maximum number of elements of a constant that is read
# maximum number of fields of a model and its parts, because a field of two bytes takes hundreds of bytes in memory
MOST_FIELDS = 1 << 20
# maximum number of nodes after inlining: thirty functions that each call the next one twice would make a billion nodes
MOST_NODES = 1_000_000
MOST_DEPTH = 200  # maximum depth of nested function calls and graphs
MOST_INPUTS = 64  # maximum number of inputs of a computed constant
LARGEST = 1 << 62  # limit of the magnitude of a computed constant
MOST_DIMENSIONS = 64  # maximum number of dimensions of a torch tensor
OPEN_SIZES = f"dynamic sizes: {OPEN_BATCH} for the first dimension of an input, else {OPEN_SIZE}"
LAYOUT = "strides and devices: the file has none, so tensors are contiguous and on the processor"
PATHS = "pkg.torch.onnx.name_scopes"
CLASSES = "pkg.torch.onnx.class_hierarchy"
# pattern of the first bytes of a model: its version, then a text, number or message
FIRST_BYTES = re.compile(rb"\x08[\x01-\x1f](?:\x12|\x1a|\x22|\x28|\x32|\x3a|\x42)", re.DOTALL)
OWN_DOMAINS = ("", "ai.onnx")
# operators whose results are computed if all their inputs are small constants
FOLDED = (
    *("Add", "Cast", "Concat", "ConstantOfShape", "Div", "Equal", "Gather", "Identity", "Max", "Min", "Mod", "Mul"),
    *("Neg", "Range", "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where"),
)
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]

_NAMES = (
    *("", "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "", "bool", "float16", "float64"),
    *("uint32", "uint64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz"),
)
_FLOAT, _INT, _STRING, _TENSOR, _FLOATS, _INTS, _STRINGS = 1, 2, 3, 4, 6, 7, 8
# dtype of the constant, name of the field, and True for a list, by type of an attribute with numbers
_PLAIN = {
    _FLOAT: (torch.float32, "f", False),
    _INT: (torch.int64, "i", False),
    _FLOATS: (torch.float32, "floats", True),
    _INTS: (torch.int64, "ints", True),
}
_VALUES = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


def read(file: ForeignFile) -> Iterator[Record]:
    onnx = needed("onnx", "onnx")
    model = _parse(file, onnx)
    graph = model.graph
    if not graph.node:
        raise UserError(f"{file.path} is an ONNX model without nodes", "name a model that computes something")
    # remove weights first, so that the model to pass around is small
    constants = _constants(graph, onnx)
    if model.functions:
        model = _inlined(model, file.losses)
        graph = model.graph
        constants |= _constants(graph, onnx)
    if _close(graph):
        file.losses.defaults.append(OPEN_SIZES)
    shapes = _shapes(graph)
    opset = max((int(item.version) for item in model.opset_import if item.domain in OWN_DOMAINS), default=1)
    _Inference(opset, onnx, shapes, constants).complete(graph.node)
    facts = {"producer": f"{model.producer_name} {model.producer_version}".strip()[:200]}
    builder = RecordBuilder("onnx", file.losses, {key: value for key, value in facts.items() if value})
    storages = _Storages()
    numbers = count()
    between = lambda: storages.of(f"\0{next(numbers)}")  # noqa: E731
    for item in graph.node:
        # text that is not valid UTF-8 arrives as bytes
        op = str(item.op_type)[:100] if item.domain in OWN_DOMAINS else f"{item.domain}::{item.op_type}"[:100]
        if op == "Constant":
            continue
        try:
            if op not in TABLE:
                raise NotConverted(REASONS.get(op, "no aten operator for it"))
            node = _node(item, op, shapes, constants, storages, opset, between, builder)
            calls = TABLE[op](node)
            bound = [bind(f"aten::{call.op}", call.args, call.kwargs) for call in calls]
        except NotConverted as error:
            file.losses.skip(op, str(error)[:200])
            continue
        except (ValueError, TypeError, IndexError, OverflowError, RuntimeError, ZeroDivisionError) as error:
            file.losses.skip(op, f"arguments do not match: {one_line(error, 80)}")
            continue
        names = {id(spec): name for spec, name in zip(node.outputs, item.output, strict=False)}
        scope = _scope(item)
        for call, fitting in zip(calls, bound, strict=True):
            results = _placed(fitting, call.outputs, names, storages)
            args, kwargs, results, memory = split(fitting.args, fitting.kwargs, results)
            builder.add_call(fitting.op, args, kwargs, results, scope=scope, storages=memory)
        yield from builder.ready()
    yield from builder.end()


def _parse(file: ForeignFile, onnx: Any) -> Any:
    content = file.content()
    model = onnx.ModelProto()
    if not file.unbounded and has_more_fields(content, model.DESCRIPTOR, MOST_FIELDS):
        raise file.refusal(f"it contains more than {MOST_FIELDS:,} fields")
    try:
        model.ParseFromString(content)
    except Exception as error:
        # protobuf raises different errors for it, depending on its version
        raise file.damage(one_line(error, 100)) from error
    if not model.HasField("graph"):
        raise file.damage("it contains no graph")
    del model.training_info[:]
    return model


Key = tuple[str, str, str]


class _TooMany(ValueError):
    pass


def _inlined(model: Any, losses: Losses) -> Any:
    """Return the model with the calls of its functions replaced by the functions' nodes, if that is possible."""
    functions = {_key(item, item.name): item for item in model.functions}
    try:
        _check_functions(model.graph.node, functions)
        return needed("onnx.inliner", "onnx").inline_local_functions(model)
    except Exception as error:
        # onnx raises many types of errors for an invalid model
        losses.defaults.append(f"functions of the model: not replaced by their nodes ({one_line(error, 100)})")
    # shape inference would enter their bodies
    del model.functions[:]
    return model


def _check_functions(nodes: Iterable[Any], functions: dict[Key, Any]) -> None:
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


def _constants(graph: Any, onnx: Any) -> dict[str, list[Any]]:
    constants: dict[str, list[Any]] = {}
    for item in graph.initializer:
        values = _values(item, onnx)
        if values is not None:
            constants[item.name] = values
        else:
            for field in (*_VALUES, "external_data"):
                item.ClearField(field)
            item.ClearField("data_location")
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in OWN_DOMAINS and node.output:
            for attribute in node.attribute:
                value = _attribute(attribute, onnx)
                if isinstance(value, list | int | float):
                    constants[node.output[0]] = value if isinstance(value, list) else [value]
    return constants


def _values(item: Any, onnx: Any) -> list[Any] | None:
    if any(size < 0 for size in item.dims) or prod(item.dims) > MOST_CONSTANT or item.external_data:
        return None
    if item.data_location == onnx.TensorProto.EXTERNAL or not _dtype(item.data_type):
        return None
    try:
        values = torch.from_numpy(onnx.numpy_helper.to_array(item).copy()).reshape(-1).tolist()
    except Exception:
        # a damaged tensor, or a dtype that numpy lacks: treat it as a tensor without values
        return None
    return list(values)


def _dtype(number: int) -> torch.dtype | None:
    return DTYPES.get(_NAMES[number]) if 0 <= number < len(_NAMES) else None


def _attribute(attribute: Any, onnx: Any) -> Any:
    kind = attribute.type
    if kind == _STRING:
        return attribute.s.decode(errors="replace")
    if kind == _STRINGS:
        return [item.decode(errors="replace") for item in attribute.strings]
    if kind == _TENSOR:
        return _values(attribute.t, onnx)
    if kind not in _PLAIN:
        return None
    _, field, is_list = _PLAIN[kind]
    return list(getattr(attribute, field)) if is_list else getattr(attribute, field)


def _close(graph: Any) -> bool:
    sizes: dict[str, int] = {}
    for item in graph.input:
        for index, dimension in enumerate(item.type.tensor_type.shape.dim):
            if dimension.WhichOneof("value") == "dim_value" and dimension.dim_value >= 0:
                continue
            size = OPEN_SIZE if index else OPEN_BATCH
            name = dimension.dim_param or f"\0{len(sizes)}"
            dimension.dim_value = sizes.setdefault(name, size)
    if sizes:
        # inferred shapes may depend on the old sizes
        open_ones = [item for item in graph.value_info if not _is_concrete(item)]
        for item in open_ones:
            graph.value_info.remove(item)
        for item in graph.output:
            if not _is_concrete(item):
                item.type.tensor_type.ClearField("shape")
    return bool(sizes)


def _is_concrete(value: Any) -> bool:
    return all(item.WhichOneof("value") == "dim_value" for item in value.type.tensor_type.shape.dim)


@dataclass(frozen=True, slots=True)
class _Inference:
    """Computes further shapes and small constants of a graph from the known ones, and adds them to these."""

    opset: int
    onnx: Any
    shapes: Shapes
    constants: dict[str, list[Any]]

    def complete(self, nodes: Iterable[Any]) -> None:
        for node in nodes:
            names = [name for name in node.input if name]
            is_own = node.domain in OWN_DOMAINS and node.op_type != "Constant"
            if not is_own or not all(name in self.shapes for name in names):
                continue
            if node.op_type == "Shape" and len(node.output) == 1:
                ends = {item.name: item.i for item in node.attribute}
                sizes = list(self.shapes[node.input[0]][1])
                self._keep(node.output[0], sizes[ends.get("start", 0) : ends.get("end", len(sizes))])
            with suppress(Exception):
                # onnx raises many types of errors; missing shapes are reported with the nodes that need them
                self._add(node)

    def _add(self, node: Any) -> None:
        is_folded = self._is_folded(node)
        if not is_folded and all(name in self.shapes for name in node.output if name):
            return
        helper, types, data = self.onnx.helper, {}, {}
        for name in filter(None, node.input):
            dtype, shape = self.shapes[name]
            number = _NAMES.index(plain_name(dtype))
            types[name] = helper.make_tensor_type_proto(number, shape)
            if name in self.constants and len(self.constants[name]) == prod(shape):
                data[name] = helper.make_tensor(name, number, shape, self.constants[name])
        schema = self.onnx.defs.get_schema(node.op_type, self.opset, "")
        imports = [helper.make_opsetid("", self.opset)]
        results = self.onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=imports)
        values = [helper.make_value_info(name, result) for name, result in results.items()]
        inferred = dict(pair for value in values for pair in _shape_of(value))
        for name, described in inferred.items():
            self.shapes.setdefault(name, described)
        if is_folded and prod(inferred[node.output[0]][1]) <= MOST_CONSTANT:
            self._fold(node, data)

    def _is_folded(self, node: Any) -> bool:
        if len(node.output) != 1 or node.output[0] in self.constants or not 0 < len(node.input) <= MOST_INPUTS:
            return False
        # attributes without a value may be subgraphs, or tensors in other files
        is_plain = all(_attribute(item, self.onnx) is not None for item in node.attribute)
        return is_plain and node.op_type in FOLDED and all(name in self.constants for name in node.input)

    def _fold(self, node: Any, data: dict[str, Any]) -> None:
        result = self.onnx.helper.make_empty_tensor_value_info(node.output[0])
        graph = self.onnx.helper.make_graph([node], "folded", [], [result], initializer=list(data.values()))
        evaluator = needed("onnx.reference", "onnx").ReferenceEvaluator(graph, opsets={"": self.opset})
        with np.errstate(all="raise"):
            (array,) = evaluator.run(None, {})
        self._keep(node.output[0], array.reshape(-1).tolist())

    def _keep(self, name: str, values: list[Any]) -> None:
        if len(values) <= MOST_CONSTANT and all(
            isinstance(item, int | float) and abs(item) < LARGEST for item in values
        ):
            self.constants[name] = values


def _shape_of(item: Any) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
    kind = item.type.tensor_type
    if len(kind.shape.dim) > MOST_DIMENSIONS:
        return
    dtype = _dtype(kind.elem_type)
    if dtype is not None and kind.HasField("shape") and _is_concrete(item):
        yield item.name, (dtype, tuple(int(size.dim_value) for size in item.type.tensor_type.shape.dim))


def _shapes(graph: Any) -> Shapes:
    values = (*graph.input, *graph.output, *graph.value_info)
    shapes = {name: shape for item in values for name, shape in _shape_of(item)}
    weights = [(item.name, item) for item in graph.initializer]
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in OWN_DOMAINS and node.output:
            weights += [(node.output[0], attribute.t) for attribute in node.attribute if attribute.type == _TENSOR]
            plain = [attribute for attribute in node.attribute if attribute.type in _PLAIN]
            for attribute in plain[:1]:
                plain_dtype, field, is_list = _PLAIN[attribute.type]
                shapes[node.output[0]] = plain_dtype, (len(getattr(attribute, field)),) if is_list else ()
    for name, item in weights:
        dtype = _dtype(item.data_type)
        if dtype is not None and len(item.dims) <= MOST_DIMENSIONS:
            shapes[name] = dtype, tuple(map(int, item.dims))
    return shapes


def _node(
    item: Any,
    op: str,
    shapes: Shapes,
    constants: dict[str, list[Any]],
    storages: _Storages,
    opset: int,
    between: Any,
    builder: RecordBuilder,
) -> OnnxNode:
    onnx = needed("onnx", "onnx")

    def value(name: str, is_input: bool) -> TensorSpec | None:
        if not name:
            return None
        if name not in shapes:
            raise NotConverted(f"onnx cannot infer the shape of one of its {'inputs' if is_input else 'outputs'}")
        dtype, shape = shapes[name]
        if not all(0 <= size < LIMIT >> 1 for size in shape) or prod(shape) >= LIMIT >> 1:
            raise NotConverted(f"the shape of one of its tensors is negative or too large: {str(shape)[:60]}")
        spec = tensor(shape, dtype, storages.of(name) if is_input else None)
        values = constants.get(name)
        fits = values is not None and len(values) == prod(shape) and 0 < len(values) <= MAX_ELEMENTS
        if not fits or not all(isinstance(element, int | float) and isfinite(element) for element in values or ()):
            return spec
        return replace(spec, values=builder.add_values(Exact(list(values or ()))))

    attributes = {attribute.name: _attribute(attribute, onnx) for attribute in item.attribute}
    inputs = tuple(value(name, True) for name in item.input)
    outputs = tuple(value(name, False) for name in item.output)
    return OnnxNode(op, inputs, outputs, tuple(map(constants.get, item.input)), attributes, opset, between)


@dataclass(slots=True)
class _Storages:
    numbers: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def of(self, name: str) -> int:
        if name not in self.numbers:
            self.numbers[name] = self.count
            self.count += 1
        return self.numbers[name]

    def give(self, name: str, shared: int | None) -> int:
        if shared is None:
            self.numbers.pop(name, None)
            return self.of(name)
        self.numbers[name] = shared
        return shared


def _placed(call: Bound, outputs: Any, names: dict[int, str], storages: _Storages) -> Any:
    shared = _aliases(call)
    results = list(tensors(outputs))
    shared = shared * len(results) if isinstance(outputs, list) else shared + [None] * len(results)
    memory = {id(spec): alias for spec, alias in zip(results, shared, strict=False)}

    def with_storage(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec) or id(leaf) not in names:
            return leaf
        return replace(leaf, storage=storages.give(names[id(leaf)], memory[id(leaf)]))

    return map_leaves(with_storage, outputs)


def _aliases(call: Bound) -> list[int | None]:
    # for each result, the storage of the argument whose memory it shares
    schema = schemas_of(call.op)[0]
    memory: dict[str, int] = {}
    for index, parameter in enumerate(schema.arguments):
        value = call.args[index] if index < len(call.args) else call.kwargs.get(parameter.name)
        first = next(tensors(value), None)
        if parameter.alias_info is not None and first is not None and first.storage is not None:
            memory |= dict.fromkeys(parameter.alias_info.before_set, first.storage)
    return [_memory_of(item.alias_info, memory) for item in schema.returns]


def _memory_of(alias: Any, memory: dict[str, int]) -> int | None:
    if alias is None:
        return None
    if not alias.before_set:
        # torch does not report the alias set of a list of views
        return next(iter(memory.values()), None)
    return next((memory[name] for name in alias.before_set if name in memory), None)


def _scope(item: Any) -> Scope:
    facts = {prop.key: prop.value for prop in item.metadata_props} if hasattr(item, "metadata_props") else {}
    paths, classes = (re.findall(r"'([^']*)'", facts.get(key, "")[:20_000]) for key in (PATHS, CLASSES))
    if paths:
        # the last of both is the operator's
        kind = classes[len(paths) - 2].rpartition(".")[2] if 1 < len(paths) <= len(classes) else ""
        return Scope(0, paths[-2] if len(paths) > 1 else "", kind, "forward")
    path = ""
    for part in item.name[:2000].strip("/").split("/")[:-1] if item.name.startswith("/") else ():
        path = part if part.startswith(f"{path}.") or not path else f"{path}.{part}"
    return Scope(0, path, "", "forward")


formats.register("onnx")(
    Format(
        "ONNX models: each node as equivalent aten calls, with shapes inferred by onnx",
        lambda head: FIRST_BYTES.match(head.start) is not None,
        read,
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS, LAYOUT),
    )
)
