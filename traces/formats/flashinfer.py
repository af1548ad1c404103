"""Reader and writer of definitions and workloads of FlashInfer-Bench, and reader of SOL-ExecBench.

`definitions/**/NAME.json` defines a kernel: it names the axes of the kernel's inputs and outputs and has its reference
implementation as Python text. `workloads/**/NAME.jsonl` has the sizes of these axes in each workload, and names the
safetensors files with the inputs' values. SOL-ExecBench has a folder per kernel, with `definition.json` and
`workload.jsonl`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import keyword
import math
import operator
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.traces.formats.building import (
    NO_DEVICE,
    NO_GRADIENTS,
    NO_TIMES,
    NO_VALUES,
    RecordBuilder,
    converted,
    fit_values,
    tensor_of,
)
from opgrip.traces.formats.operator_inputs import literal
from opgrip.traces.formats.operator_schemas import Bound, NotConverted, registered, schemas_of
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, Losses, formats
from opgrip.traces.io.tensor_file import STORED_AS_THEY_ARE, read_foreign_tensor, write_foreign_tensors
from opgrip.traces.schema.arguments import FormatError, TensorSpec, leaves
from opgrip.traces.schema.records import OPERATOR, Record, Scope, Signature
from opgrip.traces.schema.tensor_specs import contiguous, plain_name
from opgrip.traces.table.trace import Trace

MOST_FILES = 10_000
MOST_WORKLOADS = 1_000_000
DEFINITION_BYTES = 4 << 20
STORED_BYTES = 4 << 30  # maximum size in bytes of all stored values that are read
PARENTS = 4  # number of parent folders that are searched for the definitions
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
WORKLOAD = re.compile(rb'"definition"\s*:\s*"')
PROBLEM, WORKLOADS = "definition.json", "workload.jsonl"  # names of the files in a kernel folder of SOL-ExecBench
CUSTOM = (
    "values of inputs of type custom: the file's code for them is not run, so they are generated to suit each operator"
)
LARGEST = 1 << 62
MOST_EXPRESSION = 1000  # maximum number of characters of the expression of a size
MOST_TEXT = 1 << 16  # maximum number of characters of a reference
EPSILON = re.compile(r"\b(?:EPS|eps|epsilon)\s*=\s*([0-9.]+(?:[eE]-?[0-9]+)?)\b")


@dataclass(slots=True)
class DataSet:
    file: ForeignFile
    root: Path | None
    definitions: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    models: dict[tuple[str, str, TensorSpec], int | None] = field(default_factory=dict)
    stored_bytes: int = 0

    def definition(self, name: str) -> dict[str, Any]:
        if name not in self.definitions:
            path = self.beside("definitions", f"{name}.json") if NAME.fullmatch(name) else None
            self.definitions[name] = None if path is None else _definition(replace(self.file, path=path))
        definition = self.definitions[name]
        if definition is None:
            raise NotConverted("no definition of this name in its folder")
        return definition

    def define(self, path: Path) -> str:
        """Read a definition, and return its name."""
        definition = _definition(replace(self.file, path=path))
        name = str(definition.get("name"))
        self.definitions[name] = definition
        return name

    def beside(self, folder: str, name: str) -> Path | None:
        if self.root is None:
            return None
        top = self.root / folder
        folders = chain([top], islice((path for path in sorted(top.glob("*")) if path.is_dir()), MOST_FILES))
        return next((path for parent in folders if (path := parent / name).is_file()), None)


def recognizes(head: Head) -> bool:
    if head.path.is_dir():
        return all((head.path / name).is_dir() for name in ("definitions", "workloads")) or bool(_problems(head.path))
    start = head.start
    if start.lstrip()[:1] != b"{":
        return False
    if all(f'"{name}"'.encode() in start for name in ("op_type", "axes", "inputs", "outputs")):
        return True
    first = start.partition(b"\n")[0]
    return (WORKLOAD.search(first) is not None and b'"workload"' in first) or _is_bare(first)


def _is_bare(line: bytes) -> bool:
    return all(f'"{name}"'.encode() in line for name in ("uuid", "axes", "inputs")) and not WORKLOAD.search(line)


def _problems(path: Path) -> list[Path]:
    folders = (path, *sorted(islice(path.glob("*/"), MOST_FILES)))
    return [folder for folder in folders if (folder / PROBLEM).is_file() and (folder / WORKLOADS).is_file()]


def read(file: ForeignFile) -> Iterator[Record]:
    folders = [file.path] if file.path.is_dir() else list(file.path.absolute().parents)[:PARENTS]
    data_set = DataSet(file, next((folder for folder in folders if (folder / "definitions").is_dir()), None))
    builder = RecordBuilder("flashinfer", file.losses)
    keys: set[tuple[str, str]] = set()
    for name, workload in _workloads(data_set):
        key = (name, str(workload.get("uuid")) if isinstance(workload, dict) else "")
        if key in keys:
            # a workload occurs once for each solution that was tried on it
            continue
        if key[1]:
            keys.add(key)
        file.check(len(keys), MOST_WORKLOADS, "it has more than {:,} workloads")
        with builder.skipping(name[:200]):
            call = _call(data_set, builder, data_set.definition(name), workload)
            scope = Scope(0, "", "", "forward", function=name[:200])
            builder.add_call(call.op, call.args, call.kwargs, scope=scope)
        yield from builder.ready()
    yield from builder.end()


def _workloads(data_set: DataSet) -> Iterator[tuple[str, Any]]:
    file = data_set.file
    if file.path.is_dir() and data_set.root != file.path:
        for folder in _problems(file.path):
            yield from _problem(data_set, folder)
        return
    if file.path.is_dir():
        for path in sorted(islice(file.path.glob("workloads/**/*.jsonl"), MOST_FILES)):
            yield from _lines(replace(file, path=path))
        return
    first = next(iter(file.lines()), "").encode()
    if _is_bare(first) or (file.path.name == PROBLEM and file.path.parent in _problems(file.path.parent)):
        yield from _problem(data_set, file.path.parent, file.path if file.path.name != PROBLEM else None)
        return
    if WORKLOAD.search(first):
        yield from _lines(file)
        return
    name = data_set.define(file.path)
    path_of_workloads = data_set.beside("workloads", f"{name}.jsonl") if NAME.fullmatch(name) else None
    if path_of_workloads is None:
        # if all its axes are constants, it is its own workload
        yield name, {"axes": {}, "inputs": {}}
    else:
        yield from _lines(replace(file, path=path_of_workloads))


def _problem(data_set: DataSet, folder: Path, workloads: Path | None = None) -> Iterator[tuple[str, Any]]:
    if not (folder / PROBLEM).is_file():
        raise UserError(f"{workloads} does not name its definition", f"put its {PROBLEM} into the same folder")
    name = data_set.define(folder / PROBLEM)
    yield from _lines(replace(data_set.file, path=workloads or folder / WORKLOADS), name)


def _lines(file: ForeignFile, name: str | None = None) -> Iterator[tuple[str, Any]]:
    for line in file.lines():
        if line.strip():
            form = file.parse(line)
            if name is not None and isinstance(form, dict) and "workload" not in form:
                yield name, form
                continue
            if not isinstance(form, dict) or not isinstance(form.get("definition"), str):
                raise file.damage("a line is not a JSON object with a member `definition`")
            yield form["definition"], form.get("workload")


def _definition(file: ForeignFile) -> dict[str, Any]:
    form = file.parse(file.content(DEFINITION_BYTES))
    if not isinstance(form, dict):
        raise file.damage("it is not a JSON object")
    return form


def _call(data_set: DataSet, builder: RecordBuilder, definition: Mapping[str, Any], workload: Any) -> Bound:
    if not isinstance(workload, dict):
        raise NotConverted(f"the workload is not a JSON object: {str(workload)[:40]}")
    sizes = _sizes(definition, workload)
    sources, inputs = workload.get("inputs"), definition.get("inputs")
    if not isinstance(inputs, dict) or not isinstance(sources, dict):
        raise NotConverted("`inputs` of the definition or workload is not a JSON object")
    arguments = {
        name: _argument(data_set, builder, spec, sizes, sources.get(name, {"type": "random"}))
        for name, spec in inputs.items()
    }
    op, args, kwargs = _call_of_kernel(definition, arguments)
    call = registered(op, args, kwargs, data_set.file.losses)
    if not schemas_of(call.op):
        raise NotConverted(f"the operator {op[:60]} is not registered in this torch")
    return call


def _sizes(definition: Mapping[str, Any], workload: Mapping[str, Any]) -> dict[str, int]:
    axes, values = definition.get("axes"), workload.get("axes")
    if not isinstance(axes, dict) or not isinstance(values, dict):
        raise NotConverted("`axes` of the definition or workload is not a JSON object")
    sizes: dict[str, int] = {}
    for name, axis in axes.items():
        size = values.get(name)
        if isinstance(axis, dict) and axis.get("type") == "const":
            size = axis.get("value")
        if isinstance(axis, dict) and axis.get("type") == "expr":
            size = _size_of(axis.get("expression"), sizes | values)
        if size is None:
            raise NotConverted(f"the workload has no size for the axis {name[:40]}")
        if type(size) is not int or not 0 <= size < LARGEST:
            raise NotConverted(f"the size of the axis {name[:40]} is not a number of elements: {str(size)[:40]}")
        sizes[name] = size
    return sizes


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _size_of(expression: Any, sizes: Mapping[str, Any]) -> int:
    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.Name(id=name) if type(sizes.get(name)) is int:
                return int(sizes[name])
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                result = _OPERATORS[type(sign)](value(left), value(right))
                if abs(result) < LARGEST:
                    return result
        raise ValueError(ast.unparse(node))

    try:
        return value(ast.parse(expression if len(expression) < MOST_EXPRESSION else "", mode="eval").body)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise NotConverted(f"the size of an axis cannot be computed from {str(expression)[:60]!r}") from error


def _argument(
    data_set: DataSet, builder: RecordBuilder, spec: Any, sizes: Mapping[str, int], source: Any
) -> TensorSpec | bool | int | float:
    if not isinstance(spec, dict) or not isinstance(source, dict):
        raise NotConverted("an input of the definition or workload is not a JSON object")
    names = spec.get("shape")
    if names is None:
        value = source.get("value") if source.get("type") == "scalar" else None
        if not isinstance(value, bool | int | float) or abs(value) >= LARGEST:
            raise NotConverted("the workload has no value for an input that is a number")
        return value
    if not isinstance(names, list) or len(names) > 64 or not all(isinstance(name, str) for name in names):
        raise NotConverted(f"the shape of an input is not a list of axes: {str(names)[:40]}")
    if unknown := [name for name in names if name not in sizes]:
        raise NotConverted(f"the shape of an input has the undefined axis {unknown[0][:40]}")
    tensor = tensor_of([sizes[name] for name in names], spec.get("dtype"))
    if source.get("type") == "custom" and CUSTOM not in data_set.file.losses.defaults:
        data_set.file.losses.defaults.append(CUSTOM)
    if source.get("type") != "safetensors":
        return tensor
    return _with_values(data_set, builder, tensor, source)


def _with_values(
    data_set: DataSet, builder: RecordBuilder, tensor: TensorSpec, source: Mapping[str, Any]
) -> TensorSpec:
    name, key, losses = str(source.get("path"))[:1000], str(source.get("tensor_key")), data_set.file.losses
    try:
        if (name, key, tensor) not in data_set.models:
            data_set.models[name, key, tensor] = _model(data_set, builder, tensor, name, key)
    except (UserError, ValueError, OSError) as error:
        note = f"values of tensors: {name[:200]} is not read ({error})"
        if note not in losses.defaults and len(losses.defaults) < 50:
            losses.defaults.append(note)
        return tensor
    return replace(tensor, values=data_set.models[name, key, tensor])


def _model(data_set: DataSet, builder: RecordBuilder, tensor: TensorSpec, name: str, key: str) -> int | None:
    root = data_set.root
    path = None if root is None else root / name
    if path is None or root is None or not path.resolve().is_relative_to(root.resolve()):
        raise FormatError("the file is not in the folder of the definitions")
    if data_set.stored_bytes > STORED_BYTES and not data_set.file.unbounded:
        raise FormatError(
            f"the files read before hold {STORED_BYTES >> 30} GB of values, the maximum: allow more with --unbounded"
        )
    values = read_foreign_tensor(path, key)
    data_set.stored_bytes += values.nbytes
    if values.shape != tensor.shape or values.dtype != tensor.dtype:
        raise FormatError(f"its tensor {key[:60]} does not have the shape and dtype in the definition")
    model = fit_values(values)
    return None if model is None else builder.add_values(model)


Arguments = Mapping[str, Any]
Call = tuple[str, list[Any], dict[str, Any]]


def _call_of_kernel(definition: Mapping[str, Any], arguments: Arguments) -> Call:
    kind, reference = definition.get("op_type"), definition.get("reference")
    text = reference if isinstance(reference, str) else ""
    call = _call_of_reference(text, arguments)
    if call is None and isinstance(kind, str) and kind in KERNELS:
        call = KERNELS[kind](arguments, text)
    if call is None:
        name = kind if isinstance(kind, str) else "kernel"
        raise NotConverted(
            f"no operator of torch corresponds to this {name[:60]}, and its reference is not a single call"
        )
    return call


def _gemm(arguments: Arguments, reference: str) -> Call | None:
    match list(arguments.values()):
        case [TensorSpec() as left, TensorSpec() as right] if len(left.shape) == len(right.shape) == 2:
            return ("aten.linear.default", [left, right], {}) if left.shape[1] == right.shape[1] else None
    return None


def _rmsnorm(arguments: Arguments, reference: str) -> Call | None:
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


# functions that return the operator call for a kernel, by kind of kernel
KERNELS: dict[str, Callable[[Arguments, str], Call | None]] = {"gemm": _gemm, "rmsnorm": _rmsnorm}


def _call_of_reference(text: str, arguments: Arguments) -> Call | None:
    if len(text) > MOST_TEXT or "torch.ops." not in text:
        return None
    try:
        body = [item for item in ast.parse(text).body if not isinstance(item, ast.Import)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    match body:
        case [ast.FunctionDef(name="run", body=[ast.Return(value=ast.Call() as node)])]:
            path = ast.unparse(node.func).split(".")
        case _:
            return None
    if len(path) != 5 or path[:2] != ["torch", "ops"] or not all(map(str.isidentifier, path)):
        return None
    try:
        kwargs = {word.arg or "": _value(word.value, arguments) for word in node.keywords}
        return ".".join(path[2:]), [_value(item, arguments) for item in node.args], kwargs
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _value(node: ast.expr, arguments: Arguments) -> Any:
    match node:
        case ast.Name(id=name) if name in arguments:
            return arguments[name]
        case ast.List(elts=items):
            return [_value(item, arguments) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item, arguments) for item in items)
    return literal(node)


# dtypes that both torch and a definition can name
WRITTEN_DTYPES = (
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "bool"),
)
# maximum number of elements of a tensor whose values are stored; larger tensors get random values
STORED_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class KernelDefinition:
    op: str
    reference: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    members: list[tuple[Signature, list[tuple[int, ...]], list[tuple[int, ...]]]] = field(default_factory=list)


def write_folder(trace: Trace, folder: Path, losses: Losses) -> None:
    for name in ("definitions", "workloads"):
        (folder / name).mkdir()
    kernels: dict[str, KernelDefinition] = {}
    for signature, kernel, calls in converted(trace, losses, _kernel):
        _, inputs, outputs = kernel.members[0]
        key = f"{kernel.reference} {kernel.inputs} {kernel.outputs} {list(map(len, (*inputs, *outputs)))}"
        kernels.setdefault(key, replace(kernel, members=[])).members.extend(kernel.members)
        for what in _lost(signature, len(calls)):
            losses.lose(int(calls.index[0]), signature.op, what)
    for kernel in kernels.values():
        if _axes(kernel) is not None:
            _write_kernel(kernel, trace, folder)
        else:
            by_shapes: dict[str, list[Any]] = {}
            for member in kernel.members:
                by_shapes.setdefault(repr(member[1:]), []).append(member)
            for members in by_shapes.values():
                _write_kernel(replace(kernel, members=members), trace, folder)


def _lost(signature: Signature, count: int) -> Iterator[str]:
    tensors = [leaf for leaf in leaves((signature.args, signature.kwargs)) if isinstance(leaf, TensorSpec)]
    if count > 1:
        yield "how often it was called"
    if any(tensor.stride != contiguous(tensor.shape) or tensor.offset for tensor in tensors):
        yield "strides of tensors"
    if any(tensor.values is not None and tensor.dtype.is_floating_point for tensor in tensors):
        yield "values of floats"
    if any(tensor.device != "cpu" for tensor in tensors):
        yield "devices of tensors"


def _kernel(signature: Signature) -> KernelDefinition:
    if signature.kind != OPERATOR:
        raise NotConverted("not an operator of torch's dispatcher")
    schema = next(iter(schemas_of(signature.op)), None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    inputs: list[tuple[str, TensorSpec]] = []

    def text(name: str, value: Any) -> str:
        if isinstance(value, TensorSpec):
            free = f"{name}_" if keyword.iskeyword(name) else name
            inputs.append((free, value))
            return free
        if isinstance(value, list | tuple):
            items = [text(f"{name}_{index}", item) for index, item in enumerate(value)]
            return f"[{', '.join(items)}]"
        return _literal(value)

    parts = [text(names[index] if index < len(names) else f"x{index}", arg) for index, arg in enumerate(signature.args)]
    parts += [f"{name}={text(name, value)}" for name, value in signature.kwargs.items()]
    results = [leaf for leaf in leaves(signature.outputs) if isinstance(leaf, TensorSpec)]
    outputs = [("output" if len(results) == 1 else f"output_{index}", item) for index, item in enumerate(results)]
    parameters = ", ".join(name for name, _ in inputs)
    call = f"torch.ops.{signature.op}({', '.join(parts)})"
    return KernelDefinition(
        signature.op,
        f"import torch\n\n\ndef run({parameters}):\n    return {call}\n",
        tuple((name, _dtype(tensor)) for name, tensor in inputs),
        tuple((name, _dtype(tensor)) for name, tensor in outputs),
        [(signature, [tensor.shape for _, tensor in inputs], [tensor.shape for _, tensor in outputs])],
    )


def _literal(value: Any) -> str:
    match value:
        case float() if not math.isfinite(value):
            raise NotConverted("unsupported: infinite or NaN number")
        case None | bool() | int() | float() | str():
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
        case torch.device():
            return f"torch.device({str(value)!r})"
    raise NotConverted(f"the format cannot represent a value of type {type(value).__name__}")


def _dtype(tensor: TensorSpec) -> str:
    name = plain_name(tensor.dtype)
    if name not in WRITTEN_DTYPES:
        raise NotConverted(f"the format has no dtype {name}")
    if tensor.layout != torch.strided or tensor.cls is not None or tensor.made_of is not None:
        raise NotConverted("unsupported: tensor that is sparse, quantized or of a subclass")
    return name


Sizes = tuple[int, ...]  # sizes of one dimension in all members


def _axes(kernel: KernelDefinition) -> dict[Sizes, str] | None:
    axes: dict[Sizes, str] = {}
    variables = 0
    for is_output in (False, True):
        for sizes in _dimensions(kernel, is_output):
            if sizes in axes:
                continue
            if len(set(sizes)) == 1:
                axes[sizes] = f"size_{sizes[0]}"
            elif is_output:
                return None
            else:
                axes[sizes] = f"n{variables}"
                variables += 1
    return axes


def _dimensions(kernel: KernelDefinition, is_output: bool) -> Iterator[Sizes]:
    shapes = [member[2] if is_output else member[1] for member in kernel.members]
    for tensor in zip(*shapes, strict=True):
        yield from zip(*tensor, strict=True)


def _write_kernel(kernel: KernelDefinition, trace: Trace, folder: Path) -> None:
    axes = _axes(kernel)
    assert axes is not None, "it was looked at before"
    kind = kernel.op.split(".")[1]
    parts = (kernel.op, kernel.reference, kernel.inputs, kernel.outputs, sorted(axes.items()))
    name = f"{kind}_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"

    def specs(tensors: Sequence[tuple[str, str]], is_output: bool) -> dict[str, Any]:
        dimensions = iter(_dimensions(kernel, is_output))
        shapes = kernel.members[0][2] if is_output else kernel.members[0][1]
        return {
            tensor: {"shape": [axes[next(dimensions)] for _ in shape], "dtype": dtype}
            for (tensor, dtype), shape in zip(tensors, shapes, strict=True)
        }

    definition = {
        "name": name,
        "op_type": kind,
        "tags": [f"operator:{kernel.op}"],
        "axes": {
            axis: {"type": "const", "value": sizes[0]} if axis.startswith("size_") else {"type": "var"}
            for sizes, axis in axes.items()
        },
        "inputs": specs(kernel.inputs, False),
        "outputs": specs(kernel.outputs, True),
        "reference": kernel.reference,
    }
    path = folder / "definitions" / kind / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(definition, indent=2))
    lines = []
    for index, (signature, _, _) in enumerate(kernel.members):
        identity = str(uuid.UUID(hashlib.sha256(f"{name} {index}".encode()).hexdigest()[:32]))
        variables = {axis: sizes[index] for sizes, axis in axes.items() if not axis.startswith("size_")}
        inputs = _sources(
            kernel, signature, trace, folder, f"blob/workloads/{kind}/{name}/{name}_{identity}.safetensors"
        )
        workload = {"uuid": identity, "axes": variables, "inputs": inputs}
        lines.append(json.dumps({"definition": name, "solution": None, "workload": workload, "evaluation": None}))
    path = folder / "workloads" / kind / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def _sources(kernel: KernelDefinition, signature: Signature, trace: Trace, folder: Path, file: str) -> dict[str, Any]:
    specs = [leaf for leaf in leaves((signature.args, signature.kwargs)) if isinstance(leaf, TensorSpec)]
    stored: dict[str, torch.Tensor] = {}
    for (name, _), spec in zip(kernel.inputs, specs, strict=True):
        model = trace.values.get(spec.values) if spec.values is not None else None
        is_whole = not spec.dtype.is_floating_point and spec.dtype in STORED_AS_THEY_ARE
        if model is not None and is_whole and 0 < math.prod(spec.shape) <= STORED_ELEMENTS:
            stored[name] = model.draw(spec.shape, spec.dtype, torch.Generator().manual_seed(0))
    if stored:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write_foreign_tensors(path, stored)
    return {
        name: {"type": "safetensors", "path": file, "tensor_key": name} if name in stored else {"type": "random"}
        for name, _ in kernel.inputs
    }


formats.register("flashinfer")(
    Format(
        "FlashInfer-Bench's and SOL-ExecBench's definitions and workloads: a folder, JSON or JSON Lines",
        recognizes,
        read,
        write_folder=write_folder,
        suffixes=(".flashinfer",),
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS, NO_DEVICE),
        is_collection=True,
    )
)
