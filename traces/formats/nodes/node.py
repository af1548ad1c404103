"""A node of an execution trace, the codes of its types, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opgrip.errors import FormatError
from opgrip.traces.schema.tensor_specs import DTYPES

# in the order of c10::ScalarType, which only grows at its end
_SCALAR_TYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16", "quint4x2", "quint2x4"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64"),
    *(f"uint{bits}" for bits in range(1, 8)),
    *(f"int{bits}" for bits in range(1, 8)),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "_mkldnn", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged")
_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")

DTYPE_CODES: dict[torch.dtype, int] = {DTYPES[name]: code for code, name in enumerate(_SCALAR_TYPES) if name in DTYPES}
LAYOUT_CODES: dict[torch.layout, int] = {
    getattr(torch, name): code for code, name in enumerate(_LAYOUTS) if hasattr(torch, name)
}
MEMORY_FORMAT_CODES: dict[torch.memory_format, int] = {
    getattr(torch, name): code for code, name in enumerate(_MEMORY_FORMATS) if hasattr(torch, name)
}
DTYPE_OF_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}
LAYOUT_OF_CODE = {code: layout for layout, code in LAYOUT_CODES.items()}
MEMORY_FORMAT_OF_CODE = {code: item for item, code in MEMORY_FORMAT_CODES.items()}

ELEMENT_NAMES: dict[torch.dtype, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "long int",
    torch.int32: "int",
    torch.int16: "short int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex32: "c10::complex<c10::Half>",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
    torch.uint16: "short unsigned int",
    torch.uint32: "unsigned int",
    torch.uint64: "long unsigned int",
    torch.qint8: "c10::qint8",
    torch.quint8: "c10::quint8",
    torch.qint32: "c10::qint32",
    **{dtype: f"c10::F{name[1:]}" for name, dtype in DTYPES.items() if name.startswith("float8")},
}
"""What C++ calls the elements of a dtype, as the compilers name it that Linux has."""
DTYPE_OF_ELEMENT: dict[str, torch.dtype] = {
    **{name: dtype for dtype, name in ELEMENT_NAMES.items()},
    # other compilers, and libraries of their own
    "long": torch.int64,
    "long long": torch.int64,
    "short": torch.int16,
    "unsigned short": torch.uint16,
    "unsigned long": torch.uint64,
    "__int64": torch.int64,
    "char": torch.int8,
    "half": torch.float16,
    "c10::complex<half>": torch.complex32,
}


SCHEMA_VERSION = "1.1.1-chakra.0.0.4"
"""The newest that et_replay and Chakra's converter read, and the one that torch 2.13 writes."""
LATEST_NUMBER = 1 << 53
"""Bound of nodes' numbers."""
NONE = "<None>"
"""What stands for None among the values."""
FUNCTION_SCOPE, BACKWARD_SCOPE, USER_SCOPE = 0, 1, 7
"""What recorded a node, as torch counts it: an operator, a backward node, a label of the program."""
PROCESS = "[pytorch|profiler|execution_trace|process]"
THREAD = "[pytorch|profiler|execution_trace|thread]"
THREADS = (THREAD, "[pytorch|profiler|execution_graph|thread]")
ROOTS = (*THREADS, PROCESS, "[pytorch|profiler|execution_graph|process]")
BACKWARD_LABEL = "autograd::engine::evaluate_function: "
OPTIMIZER_LABEL = "Optimizer.step#"
OPTIMIZER_STEP = f"{OPTIMIZER_LABEL}step"
"""The label of an optimizer's step that the program has no label of its own for."""
MODULE_LABEL = "nn.Module: "


@dataclass(frozen=True, slots=True)
class Port:
    """What goes into a node, or comes out of it: four lists of equal length, which is all that is checked of them.

    Attributes
    ----------
    values : numbers, texts, lists of such; of a tensor `[tensor, storage, offset, elements, bytes of each, device]`
    shapes : of tensors; empty for all else
    types : `Tensor(float)`, `Int`, `GenericList[Int,Int]`
    strides : of tensors, as `shapes` has them; None in files before schema 1.1.1
    """

    values: list[Any]
    shapes: list[Any]
    types: list[Any]
    strides: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node, with nothing of it checked but its own fields.

    Attributes
    ----------
    number : nodes begin in the order of their numbers
    parent : number of the node around it; its own for the process
    schema : an operator's, as torch writes it; empty for all else
    scope : what recorded it, as `USER_SCOPE`
    thread : the observer's number of it
    backend : what made a kernel of torch.compile's, `triton`; empty for all else
    record : number of the call, the same for all parts that Chakra splits an operator into; 0 where none is told
    start_us : when it began, where a profiler's times were linked to the trace
    own_us : how long it took without the nodes inside it
    ranges : the least and largest value of inputs that are tensors, by their place among these: JSON, or empty
    stream : of a kernel, the device's stream; None for what runs on the host
    """

    number: int
    name: str
    parent: int
    inputs: Port
    outputs: Port
    schema: str = ""
    scope: int = FUNCTION_SCOPE
    thread: int = 0
    backend: str = ""
    record: int = 0
    start_us: float | None = None
    own_us: float | None = None
    stream: int | None = None
    ranges: str = ""


NO_PORT = Port([], [], [])


LATEST_US = 1e15
"""Bound of times, 30 years."""


def node_from_json(form: Any) -> Node:
    """The node of an object, of any schema.

    Raises
    ------
    FormatError : for one that is none
    """
    if not isinstance(form, dict):
        raise FormatError("a node that is no object")
    attributes = _attributes(form)
    inputs, outputs = _port(form, "input"), _port(form, "output")
    is_kernel = isinstance(form.get("cat"), str)
    stream = form.get("stream")
    return Node(
        number=_number(form.get("id")),
        name=_text(form.get("name")),
        parent=_number(form.get("ctrl_deps", form.get("parent"))),
        inputs=inputs,
        outputs=outputs,
        schema=_text(attributes.get("op_schema", "")),
        scope=_number(attributes.get("scope", 0)),
        thread=_number(attributes.get("tid", 0)),
        backend=_text(attributes.get("kernel_backend", "")),
        start_us=_time(form.get("ts")),
        own_us=_time(form.get("exclusive_dur")),
        ranges=_text(attributes.get("tensor_range", "")),
        stream=(stream if type(stream) is int and 0 <= stream < LATEST_NUMBER else 0) if is_kernel else None,
    )


def _attributes(form: Mapping[str, Any]) -> Mapping[str, Any]:
    """A node's attributes by name; before schema 1.0.2 they stand in the node."""
    attributes = form.get("attrs")
    if attributes is None:
        return form
    if not isinstance(attributes, list):
        raise FormatError("attributes that are no list")
    named: dict[str, Any] = {}
    for item in attributes:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise FormatError("an attribute without a name")
        named[item["name"]] = item.get("value")
    return named


def _port(form: Mapping[str, Any], name: str) -> Port:
    port = form.get(f"{name}s")
    if isinstance(port, dict):
        columns = [port.get(key, []) for key in ("values", "shapes", "types")]
        strides = port.get("strides")
    else:
        columns = [port if port is not None else [], form.get(f"{name}_shapes", []), form.get(f"{name}_types", [])]
        strides = form.get(f"{name}_strides")
    if not all(isinstance(column, list) for column in columns) or not isinstance(strides, list | None):
        raise FormatError(f"{name}s that are no lists")
    values, shapes, types = columns
    if not len(values) == len(shapes) == len(types) or (strides is not None and len(strides) != len(values)):
        raise FormatError(f"{name}s whose values, shapes and types differ in number")
    return Port(values, shapes, types, strides)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LATEST_NUMBER:
        raise FormatError(f"{str(value)[:60]} is no number of a node")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{str(value)[:60]} is no text")
    return value


def _time(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < LATEST_US:
        raise FormatError(f"{str(value)[:60]} is no time")
    return float(value)


def node_to_json(node: Node) -> dict[str, Any]:
    """The object of a node, of schema 1.1.1; times and kernels as Chakra's `trace_link` adds them."""
    attributes = [
        ("rf_id", "uint64", node.number),
        ("fw_parent", "uint64", 0),
        ("seq_id", "int64", -1),
        ("scope", "uint64", node.scope),
        ("tid", "uint64", node.thread),
        ("fw_tid", "uint64", 0),
        ("op_schema", "string", node.schema),
        ("kernel_backend", "string", node.backend),
        ("kernel_file", "string", ""),
        ("tensor_range", "string", node.ranges),
    ]
    form: dict[str, Any] = {
        "id": node.number,
        "name": node.name,
        "ctrl_deps": node.parent,
        "inputs": _port_to_json(node.inputs),
        "outputs": _port_to_json(node.outputs),
        "attrs": [{"name": name, "type": kind, "value": value} for name, kind, value in attributes],
    }
    if node.start_us is not None and node.own_us is not None:
        form |= {"ts": node.start_us, "inclusive_dur": node.own_us, "exclusive_dur": node.own_us}
    if node.stream is not None:
        form |= {"cat": "kernel", "stream": node.stream}
    return form


def _port_to_json(port: Port) -> dict[str, Any]:
    strides = port.strides if port.strides is not None else []
    return {"values": port.values, "shapes": port.shapes, "types": port.types, "strides": strides}
