"""Definitions and workloads of FlashInfer-Bench, and the torch operator that corresponds to each kernel.

A data set is a folder. `definitions/**/NAME.json` names the axes of a kernel's inputs and outputs and has its reference
as Python text. `workloads/**/NAME.jsonl` has the sizes of the axes of each workload, and refers to its values in
safetensors files. A workload becomes a call if a torch operator does the same as its kernel: by the kind of the kernel,
or because the reference is a single operator call. The reference is parsed and never run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from opgrip.traces.formats.building import NO_DEVICE, NO_GRADIENTS, NO_TIMES, NO_VALUES, RecordBuilder, fit_values
from opgrip.traces.formats.flashinfer_folders import write_folder
from opgrip.traces.formats.operator_inputs import literal
from opgrip.traces.formats.operator_schemas import NoOverload, registered, schemas_of
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, formats
from opgrip.traces.io.tensor_file import read_foreign_tensor
from opgrip.traces.schema.arguments import FormatError, TensorSpec
from opgrip.traces.schema.records import Record
from opgrip.traces.schema.tensor_specs import DTYPES, contiguous

MOST_TEXT = 1 << 16
"""Characters of a reference that is parsed."""
EPSILON = re.compile(r"\b(?:EPS|eps|epsilon)\s*=\s*([0-9.]+(?:[eE]-?[0-9]+)?)\b")

Arguments = Mapping[str, Any]
Call = tuple[str, list[Any], dict[str, Any]]


def call_of_kernel(definition: Mapping[str, Any], arguments: Arguments) -> Call:
    """Return the operator that corresponds to a kernel, with its arguments; raise `NoOverload` if none does."""
    kind, reference = definition.get("op_type"), definition.get("reference")
    call = _call_of_reference(reference, arguments) if isinstance(reference, str) else None
    if call is None and isinstance(kind, str) and kind in KERNELS:
        call = KERNELS[kind](arguments, reference if isinstance(reference, str) else "")
    if call is None:
        raise NoOverload(f"no operator of torch corresponds to this {str(kind)[:60]}")
    return call


def _gemm(arguments: Arguments, reference: str) -> Call | None:
    """Multiply A (M, K) by the transpose of B (N, K)."""
    match list(arguments.values()):
        case [TensorSpec() as left, TensorSpec() as right] if len(left.shape) == len(right.shape) == 2:
            return ("aten.linear.default", [left, right], {}) if left.shape[1] == right.shape[1] else None
    return None


def _rmsnorm(arguments: Arguments, reference: str) -> Call | None:
    """Divide rows by their root mean square and multiply by a weight; kernels that add before are excluded."""
    tensors = [value for value in arguments.values() if isinstance(value, TensorSpec)]
    numbers = [value for value in arguments.values() if isinstance(value, float)]
    if len(tensors) != 2 or len(numbers) + 2 != len(arguments) or len(numbers) > 1:
        return None
    rows, weight = tensors
    if not rows.shape or weight.shape != rows.shape[-1:]:
        return None
    written = EPSILON.search(reference)
    try:
        epsilon = numbers[0] if numbers else float(written[1]) if written else None
    except ValueError:
        epsilon = None
    return "aten.rms_norm.default", [rows, list(weight.shape), weight, epsilon], {}


KERNELS: dict[str, Callable[[Arguments, str], Call | None]] = {"gemm": _gemm, "rmsnorm": _rmsnorm}
"""Kinds of kernels that correspond to an operator of torch."""


def _call_of_reference(text: str, arguments: Arguments) -> Call | None:
    """Return the only call of a reference such as `def run(x): return torch.ops.aten.relu.default(x)`, else None."""
    if len(text) > MOST_TEXT or "torch.ops." not in text:
        return None
    try:
        body = [item for item in ast.parse(text).body if not isinstance(item, ast.Import)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    match body:
        case [ast.FunctionDef(name="run", body=[ast.Return(value=ast.Call() as node)])]:
            path = ast.unparse(node.func).split(".") if _is_path(node.func) else []
        case _:
            return None
    if len(path) != 5 or path[:2] != ["torch", "ops"]:
        return None
    try:
        kwargs = {word.arg or "": _value(word.value, arguments) for word in node.keywords}
        return ".".join(path[2:]), [_value(item, arguments) for item in node.args], kwargs
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_path(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _value(node: ast.expr, arguments: Arguments) -> Any:
    match node:
        case ast.Name(id=name) if name in arguments:
            return arguments[name]
        case ast.List(elts=items):
            return [_value(item, arguments) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item, arguments) for item in items)
    return literal(node)


MOST_FILES = 10_000
MOST_WORKLOADS = 1_000_000
DEFINITION_BYTES = 4 << 20
STORED_BYTES = 4 << 30
"""maximum size of all stored values that are read"""
PARENTS = 4
"""Folders above a file that are searched for the definitions."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
WORKLOAD = re.compile(rb'"definition"\s*:\s*"')
LARGEST = 1 << 62


class NoCall(ValueError):
    """A workload is not a call of an operator."""


@dataclass(slots=True)
class DataSet:
    """Folder of definitions and workloads.

    file : file or folder to read
    root : the folder, or None for a file outside of such a folder
    models : numbers of value models by file, key and tensor of the stored values
    stored_bytes : bytes of stored values read so far
    """

    file: ForeignFile
    root: Path | None
    definitions: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    models: dict[tuple[str, str, TensorSpec], int | None] = field(default_factory=dict)
    stored_bytes: int = 0

    def definition(self, name: str) -> dict[str, Any]:
        """Return the definition of a name; raise `NoCall` if there is none."""
        if name not in self.definitions:
            self.definitions[name] = self._load(name)
        definition = self.definitions[name]
        if definition is None:
            raise NoCall("no definition of this name in its folder")
        return definition

    def _load(self, name: str) -> dict[str, Any] | None:
        path = self.beside("definitions", f"{name}.json") if NAME.fullmatch(name) else None
        return None if path is None else _definition(ForeignFile(path, self.file.losses, self.file.unbounded))

    def beside(self, folder: str, name: str) -> Path | None:
        """Return a file in a folder of the data set or in one of its subfolders."""
        if self.root is None:
            return None
        top = self.root / folder
        places = chain([top], islice((path for path in sorted(top.glob("*")) if path.is_dir()), MOST_FILES))
        return next((path for place in places if (path := place / name).is_file()), None)


def recognizes(head: Head) -> bool:
    if head.path.is_dir():
        return (head.path / "definitions").is_dir() and (head.path / "workloads").is_dir()
    start = head.start
    if start.lstrip()[:1] != b"{":
        return False
    if all(f'"{name}"'.encode() in start for name in ("op_type", "axes", "inputs", "outputs")):
        return True
    return WORKLOAD.search(first := start.partition(b"\n")[0]) is not None and b'"workload"' in first


def read(file: ForeignFile) -> Iterator[Record]:
    """Yield one call per workload that is a call of an operator."""
    data_set = DataSet(file, _root_of(file.path))
    builder = RecordBuilder("flashinfer", file.losses)
    seen: set[tuple[str, str]] = set()
    for name, workload in _workloads(data_set):
        key = (name, str(workload.get("uuid")) if isinstance(workload, dict) else "")
        if key in seen:
            # a workload occurs once for each solution that was tried on it
            continue
        if key[1]:
            seen.add(key)
        if len(seen) > MOST_WORKLOADS and not file.unbounded:
            raise file.refusal(f"it has more than {MOST_WORKLOADS:,} workloads")
        try:
            call = _call(data_set, builder, data_set.definition(name), workload)
        except (NoCall, NoOverload) as error:
            file.losses.skip(name[:200], str(error))
            continue
        builder.add_call(*call)
        yield from builder.ready()
    yield from builder.end()


def _root_of(path: Path) -> Path | None:
    folders = [path] if path.is_dir() else list(path.absolute().parents)[:PARENTS]
    return next((folder for folder in folders if (folder / "definitions").is_dir()), None)


def _workloads(data_set: DataSet) -> Iterator[tuple[str, Any]]:
    """Yield each workload with the name of its definition."""
    file = data_set.file
    if file.path.is_dir():
        paths = sorted(islice(file.path.glob("workloads/**/*.jsonl"), MOST_FILES))
        for path in paths:
            yield from _lines(ForeignFile(path, file.losses, file.unbounded))
        return
    first = next(iter(file.lines()), "")
    if WORKLOAD.search(first.encode()):
        yield from _lines(file)
        return
    definition = _definition(file)
    name = str(definition.get("name"))
    data_set.definitions[name] = definition
    path_of_workloads = data_set.beside("workloads", f"{name}.jsonl") if NAME.fullmatch(name) else None
    if path_of_workloads is None:
        # if all its axes are constants, it is its own workload
        yield name, {"axes": {}, "inputs": {}}
    else:
        yield from _lines(ForeignFile(path_of_workloads, file.losses, file.unbounded))


def _lines(file: ForeignFile) -> Iterator[tuple[str, Any]]:
    for line in file.lines():
        if line.strip():
            form = file.parse(line)
            if not isinstance(form, dict) or not isinstance(form.get("definition"), str):
                raise file.damage("a line is not a workload")
            yield form["definition"], form.get("workload")


def _definition(file: ForeignFile) -> dict[str, Any]:
    form = file.parse(file.content(DEFINITION_BYTES))
    if not isinstance(form, dict):
        raise file.damage("it is not a definition")
    return form


def _call(
    data_set: DataSet, builder: RecordBuilder, definition: Mapping[str, Any], workload: Any
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(workload, dict):
        raise NoCall("the workload is not an object")
    sizes = _sizes(definition, workload)
    sources, inputs = workload.get("inputs"), definition.get("inputs")
    if not isinstance(inputs, dict) or not isinstance(sources, dict):
        raise NoCall("the inputs are not an object")
    arguments = {
        name: _argument(data_set, builder, spec, sizes, sources.get(name, {"type": "random"}))
        for name, spec in inputs.items()
    }
    op, args, kwargs = call_of_kernel(definition, arguments)
    call = registered(op, args, kwargs, data_set.file.losses)
    if not schemas_of(call.op):
        raise NoOverload(f"{op[:60]} is not registered")
    return call.op, call.args, call.kwargs


def _sizes(definition: Mapping[str, Any], workload: Mapping[str, Any]) -> dict[str, int]:
    axes, values = definition.get("axes"), workload.get("axes")
    if not isinstance(axes, dict) or not isinstance(values, dict):
        raise NoCall("the axes are not an object")
    sizes = {}
    for name, axis in axes.items():
        size = values.get(name)
        if isinstance(axis, dict) and axis.get("type") == "const":
            size = axis.get("value")
        if size is None:
            raise NoCall("no workload gives the sizes of its axes")
        if type(size) is not int or not 0 <= size < LARGEST:
            raise NoCall("the size of an axis is not a number of elements")
        sizes[name] = size
    return sizes


def _argument(
    data_set: DataSet, builder: RecordBuilder, spec: Any, sizes: Mapping[str, int], source: Any
) -> TensorSpec | bool | int | float:
    """Return an input: a tensor, with a value model if its values are stored, or a number."""
    if not isinstance(spec, dict) or not isinstance(source, dict):
        raise NoCall("an input is not an object")
    names = spec.get("shape")
    if names is None:
        value = source.get("value") if source.get("type") == "scalar" else None
        if not isinstance(value, bool | int | float) or abs(value) >= LARGEST:
            raise NoCall("the workload does not have the value of a number")
        return value
    dtype = DTYPES.get(str(spec.get("dtype")))
    if dtype is None:
        raise NoCall(f"torch has no {str(spec.get('dtype'))[:40]}")
    if not isinstance(names, list) or len(names) > 64 or not all(isinstance(name, str) for name in names):
        raise NoCall("a shape is not a list of axes")
    if unknown := [name for name in names if name not in sizes]:
        raise NoCall(f"undefined axis: {unknown[0][:40]}")
    shape = tuple(sizes[name] for name in names)
    tensor = TensorSpec(shape, contiguous(shape), dtype, "cpu")
    if source.get("type") != "safetensors":
        return tensor
    return _with_values(data_set, builder, tensor, source)


def _with_values(
    data_set: DataSet, builder: RecordBuilder, tensor: TensorSpec, source: Mapping[str, Any]
) -> TensorSpec:
    """Return the tensor with a model of its stored values, or without one if they cannot be read."""
    name, key, losses = str(source.get("path"))[:1000], str(source.get("tensor_key")), data_set.file.losses
    try:
        if (name, key, tensor) not in data_set.models:
            data_set.models[name, key, tensor] = _model(data_set, builder, tensor, name, key)
    except (FormatError, ValueError, OSError) as error:
        note = f"values of tensors: {name[:200]} is not read ({error})"
        if note not in losses.defaults and len(losses.defaults) < 50:
            losses.defaults.append(note)
        return tensor
    return replace(tensor, values=data_set.models[name, key, tensor])


def _model(data_set: DataSet, builder: RecordBuilder, tensor: TensorSpec, name: str, key: str) -> int | None:
    """Return the number of the model of stored values; raise `FormatError` if they do not fit the tensor."""
    root = data_set.root
    path = None if root is None else root / name
    if path is None or root is None or not path.resolve().is_relative_to(root.resolve()):
        raise FormatError("it is not in the folder of the definitions")
    if data_set.stored_bytes > STORED_BYTES and not data_set.file.unbounded:
        raise FormatError(f"other values already have more than {STORED_BYTES >> 30} GB")
    values = read_foreign_tensor(path, key)
    data_set.stored_bytes += values.nbytes
    if values.shape != tensor.shape or values.dtype != tensor.dtype:
        raise FormatError("its tensor has another shape or dtype than the definition's")
    model = fit_values(values)
    return None if model is None else builder.add_values(model)


formats.register("flashinfer")(
    Format(
        "FlashInfer-Bench's definitions and workloads: a folder, JSON or JSON Lines",
        recognizes,
        read,
        write_folder=write_folder,
        suffixes=(".flashinfer",),
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS, NO_DEVICE),
        is_collection=True,
    )
)
