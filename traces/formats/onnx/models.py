"""Reader of an ONNX model as the trace of one run: each node becomes equivalent calls of aten operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from math import isfinite, prod
from typing import Any

import torch

from opgrip.cli.plugins import needed
from opgrip.errors import UserError, one_line
from opgrip.traces.formats.building import (
    NO_GRADIENTS,
    NO_TIMES,
    NO_VALUES,
    GraphStorages,
    RecordBuilder,
    aliases,
    split,
)
from opgrip.traces.formats.onnx.nodes import NoOperator, OnnxCall, OnnxNode, Shapes, complete, inlined, tensor
from opgrip.traces.formats.onnx.operators import TABLE, check_operator
from opgrip.traces.formats.operator_schemas import NoOverload, bind
from opgrip.traces.formats.protobuf_files import has_more_fields
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, formats
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, tensors
from opgrip.traces.schema.json_values import LIMIT
from opgrip.traces.schema.records import Record, Scope
from opgrip.traces.schema.tensor_specs import DTYPES, plain_name
from opgrip.traces.values.exact import MAX_ELEMENTS, Exact

OPEN_BATCH, OPEN_SIZE = 1, 64
MOST_CONSTANT = 1024  # maximum number of elements of a constant that is read
# maximum number of fields of a model and its parts, because a field of two bytes takes hundreds of bytes in memory
MOST_FIELDS = 1 << 20
MOST_DIMENSIONS = 64  # maximum number of dimensions of a torch tensor
OPEN_SIZES = f"dynamic sizes: {OPEN_BATCH} for the first dimension of an input, else {OPEN_SIZE}"
LAYOUT = "strides and devices: the file has none, so tensors are contiguous and on the processor"
PATHS = "pkg.torch.onnx.name_scopes"
CLASSES = "pkg.torch.onnx.class_hierarchy"
# pattern of the first bytes of a model: its version, then a text, number or message
FIRST_BYTES = re.compile(rb"\x08[\x01-\x1f](?:\x12|\x1a|\x22|\x28|\x32|\x3a|\x42)", re.DOTALL)
OWN_DOMAINS = ("", "ai.onnx")

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


def recognizes(head: Head) -> bool:
    return FIRST_BYTES.match(head.start) is not None


def read(file: ForeignFile) -> Iterator[Record]:
    onnx = needed("onnx", "onnx")
    model = _parse(file, onnx)
    graph = model.graph
    if not graph.node:
        raise UserError(f"{file.path} is an ONNX model without nodes", "name a model that computes something")
    # remove weights first, so that the model to pass around is small
    constants = _constants(graph, onnx)
    if model.functions:
        model = inlined(model, file.losses)
        graph = model.graph
        constants |= _constants(graph, onnx)
    if _close(graph):
        file.losses.defaults.append(OPEN_SIZES)
    shapes = _shapes(graph)
    opset = max((int(item.version) for item in model.opset_import if item.domain in OWN_DOMAINS), default=1)
    complete(graph.node, shapes, constants, lambda item: _attribute(item, onnx), _node_inference(opset, onnx))
    facts = {"producer": f"{model.producer_name} {model.producer_version}".strip()[:200]}
    builder = RecordBuilder("onnx", file.losses, {key: value for key, value in facts.items() if value})
    storages = GraphStorages()
    numbers = count()
    between = lambda: storages.of(f"\0{next(numbers)}")  # noqa: E731
    for item in graph.node:
        # text that is not valid UTF-8 arrives as bytes
        op = str(item.op_type)[:100] if item.domain in OWN_DOMAINS else f"{item.domain}::{item.op_type}"[:100]
        if op == "Constant":
            continue
        try:
            check_operator(op)
            node = _node(item, op, shapes, constants, storages, opset, between, builder)
            calls = TABLE[op](node)
            bound = [bind(f"aten::{call.op}", call.args, call.kwargs) for call in calls]
        except (NoOperator, NoOverload) as error:
            file.losses.skip(op, str(error)[:200])
            continue
        except (ValueError, TypeError, IndexError, OverflowError, RuntimeError, ZeroDivisionError) as error:
            file.losses.skip(op, f"arguments do not match: {one_line(error, 80)}")
            continue
        names = {id(spec): name for spec, name in zip(node.outputs, item.output, strict=False)}
        scope = _scope(item)
        for call, fitting in zip(calls, bound, strict=True):
            call = _placed(OnnxCall(fitting.op, fitting.args, call.outputs, fitting.kwargs), names, storages)
            args, kwargs, outputs, memory = split(call.args, call.kwargs, call.outputs)
            builder.add_call(call.op, args, kwargs, outputs, scope=scope, storages=memory)
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


def _node_inference(opset: int, onnx: Any) -> Callable[..., Shapes]:
    def infer(node: Any, shapes: Shapes, constants: dict[str, list[Any]]) -> Shapes:
        types, data = {}, {}
        for name in filter(None, node.input):
            dtype, shape = shapes[name]
            number = _NAMES.index(plain_name(dtype))
            types[name] = onnx.helper.make_tensor_type_proto(number, shape)
            if name in constants and len(constants[name]) == prod(shape):
                data[name] = onnx.helper.make_tensor(name, number, shape, constants[name])
        imports = [onnx.helper.make_opsetid("", opset)]
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        results = onnx.shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=imports)
        values = [onnx.helper.make_value_info(name, result) for name, result in results.items()]
        return {name: shape for value in values for name, shape in _shape_of(value)}

    def guarded(node: Any, shapes: Shapes, constants: dict[str, list[Any]]) -> Shapes:
        try:
            return infer(node, shapes, constants)
        except Exception:
            # onnx raises many types of errors; missing shapes are reported with the nodes that need them
            return {}

    return guarded


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
    storages: GraphStorages,
    opset: int,
    between: Any,
    builder: RecordBuilder,
) -> OnnxNode:
    onnx = needed("onnx", "onnx")

    def value(name: str, is_input: bool) -> TensorSpec | None:
        if not name:
            return None
        if name not in shapes:
            raise NoOperator(f"onnx cannot infer the shape of one of its {'inputs' if is_input else 'outputs'}")
        dtype, shape = shapes[name]
        if not all(0 <= size < LIMIT >> 1 for size in shape) or prod(shape) >= LIMIT >> 1:
            raise NoOperator(f"the shape of one of its tensors is negative or too large: {str(shape)[:60]}")
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


def _placed(call: OnnxCall, names: dict[int, str], storages: GraphStorages) -> OnnxCall:
    shared = aliases(call.op, call.args, call.kwargs)
    results = list(tensors(call.outputs))
    shared = shared * len(results) if isinstance(call.outputs, list) else shared + [None] * len(results)
    memory = {id(spec): alias for spec, alias in zip(results, shared, strict=False)}

    def with_storage(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSpec) or id(leaf) not in names:
            return leaf
        return replace(leaf, storage=storages.give(names[id(leaf)], memory[id(leaf)]))

    return replace(call, outputs=map_leaves(with_storage, call.outputs))


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
        recognizes,
        read,
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS, LAYOUT),
    )
)
