"""Reader of definitions and workloads of FlashInfer-Bench and SOL-ExecBench.

A data set is a folder. `definitions/**/NAME.json` defines a kernel: it names the axes of the kernel's inputs and
outputs and has its reference implementation as Python text. `workloads/**/NAME.jsonl` has the sizes of these axes in
each workload, and names the safetensors files with its values. SOL-ExecBench has a folder per kernel, with
`definition.json` and `workload.jsonl`.

A workload becomes a call of the torch operator that computes the same as the kernel, or the calls of its reference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from opgrip.errors import UserError
from opgrip.traces.formats.building import NO_DEVICE, NO_GRADIENTS, NO_TIMES, NO_VALUES, RecordBuilder, fit_values
from opgrip.traces.formats.configurations.modules import MetaRecording
from opgrip.traces.formats.exported_values import size_of
from opgrip.traces.formats.flashinfer_folders import write_folder
from opgrip.traces.formats.flashinfer_kernels import calls_of_kernel
from opgrip.traces.formats.operator_schemas import NoOverload, registered, schemas_of
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, formats
from opgrip.traces.io.tensor_file import read_foreign_tensor
from opgrip.traces.schema.arguments import FormatError, TensorSpec
from opgrip.traces.schema.records import Record, Scope
from opgrip.traces.schema.tensor_specs import DTYPES, contiguous

MOST_FILES = 10_000
MOST_WORKLOADS = 1_000_000
DEFINITION_BYTES = 4 << 20
STORED_BYTES = 4 << 30  # maximum size in bytes of all stored values that are read
PARENTS = 4  # number of parent folders that are searched for the definitions
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
WORKLOAD = re.compile(rb'"definition"\s*:\s*"')
PROBLEM, WORKLOADS = "definition.json", "workload.jsonl"  # names of the files in a kernel folder of SOL-ExecBench
CUSTOM = "values of inputs of type custom: code of the file makes them, which is not run, so they are drawn as needed"
LARGEST = 1 << 62


class NoCall(ValueError):
    """Raised if a workload cannot be converted to a call of an operator."""


@dataclass(slots=True)
class DataSet:
    """A folder with definitions and workloads of kernels, and what was read from it so far.

    file : file or folder to read
    root : the data set's folder, or None for a file outside of one
    recording : records the operators that references call, on meta tensors
    definitions : definitions by name; None for one that does not exist
    models : number of the value model of each stored tensor, by file, key in the file, and metadata
    stored_bytes : bytes of tensor values read so far
    """

    file: ForeignFile
    root: Path | None
    recording: MetaRecording
    definitions: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    models: dict[tuple[str, str, TensorSpec], int | None] = field(default_factory=dict)
    stored_bytes: int = 0

    def definition(self, name: str) -> dict[str, Any]:
        """Return the definition of the kernel `name`; raise `NoCall` if it does not exist."""
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
        """Return the path of a file in a folder of the data set or in one of its subfolders, or None."""
        if self.root is None:
            return None
        top = self.root / folder
        places = chain([top], islice((path for path in sorted(top.glob("*")) if path.is_dir()), MOST_FILES))
        return next((path for place in places if (path := place / name).is_file()), None)


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
    """Return True if a line is a workload of SOL-ExecBench, which does not name its definition."""
    return all(f'"{name}"'.encode() in line for name in ("uuid", "axes", "inputs")) and not WORKLOAD.search(line)


def _problems(path: Path) -> list[Path]:
    """Return the folders of kernels of SOL-ExecBench: `path` itself, or its subfolders."""
    folders = (path, *sorted(islice(path.glob("*/"), MOST_FILES)))
    return [folder for folder in folders if (folder / PROBLEM).is_file() and (folder / WORKLOADS).is_file()]


def read(file: ForeignFile) -> Iterator[Record]:
    """Yield the records of a trace with one call for each workload that can be converted to an operator."""
    data_set = DataSet(file, _root_of(file.path), MetaRecording("cpu", file.unbounded))
    builder = RecordBuilder("flashinfer", file.losses)
    keys: set[tuple[str, str]] = set()
    for name, workload in _workloads(data_set):
        key = (name, str(workload.get("uuid")) if isinstance(workload, dict) else "")
        if key in keys:
            # a workload occurs once for each solution that was tried on it
            continue
        if key[1]:
            keys.add(key)
        if len(keys) > MOST_WORKLOADS and not file.unbounded:
            raise file.refusal(f"it has more than {MOST_WORKLOADS:,} workloads")
        try:
            calls = _calls(data_set, builder, data_set.definition(name), workload)
        except (NoCall, NoOverload) as error:
            file.losses.skip(name[:200], str(error))
            continue
        for call in calls:
            builder.add_call(*call, scope=Scope(0, "", "", "forward", function=name[:200]))
        yield from builder.ready()
    yield from builder.end()


def _root_of(path: Path) -> Path | None:
    folders = [path] if path.is_dir() else list(path.absolute().parents)[:PARENTS]
    return next((folder for folder in folders if (folder / "definitions").is_dir()), None)


def _workloads(data_set: DataSet) -> Iterator[tuple[str, Any]]:
    """Yield each workload as a JSON value, with the name of its definition."""
    file = data_set.file
    if file.path.is_dir() and data_set.root != file.path:
        for folder in _problems(file.path):
            yield from _problem(data_set, folder)
        return
    if file.path.is_dir():
        paths = sorted(islice(file.path.glob("workloads/**/*.jsonl"), MOST_FILES))
        for path in paths:
            yield from _lines(ForeignFile(path, file.losses, file.unbounded))
        return
    first = next(iter(file.lines()), "")
    if _is_bare(first.encode()) or (file.path.name == PROBLEM and file.path.parent in _problems(file.path.parent)):
        yield from _problem(data_set, file.path.parent, file.path if file.path.name != PROBLEM else None)
        return
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


def _problem(data_set: DataSet, folder: Path, workloads: Path | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the workloads of one kernel's folder of SOL-ExecBench, with the name of its definition."""
    losses, unbounded = data_set.file.losses, data_set.file.unbounded
    if not (folder / PROBLEM).is_file():
        raise UserError(f"{workloads} does not name its definition", f"put its {PROBLEM} into the same folder")
    definition = _definition(ForeignFile(folder / PROBLEM, losses, unbounded))
    name = str(definition.get("name"))
    data_set.definitions[name] = definition
    yield from _lines(ForeignFile(workloads or folder / WORKLOADS, losses, unbounded), name)


def _lines(file: ForeignFile, name: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield each workload in a file with the name of its definition; `name` is used for workloads that name none."""
    for line in file.lines():
        if line.strip():
            form = file.parse(line)
            if name is not None and isinstance(form, dict) and "workload" not in form:
                yield name, form
                continue
            if not isinstance(form, dict) or not isinstance(form.get("definition"), str):
                raise file.damage("a line is not a JSON object with `definition`")
            yield form["definition"], form.get("workload")


def _definition(file: ForeignFile) -> dict[str, Any]:
    form = file.parse(file.content(DEFINITION_BYTES))
    if not isinstance(form, dict):
        raise file.damage("it is not a JSON object")
    return form


def _calls(
    data_set: DataSet, builder: RecordBuilder, definition: Mapping[str, Any], workload: Any
) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    if not isinstance(workload, dict):
        raise NoCall(f"the workload is not a JSON object: {str(workload)[:40]}")
    sizes = _sizes(definition, workload)
    sources, inputs = workload.get("inputs"), definition.get("inputs")
    if not isinstance(inputs, dict) or not isinstance(sources, dict):
        raise NoCall("`inputs` of the definition or workload is not a JSON object")
    arguments = {
        name: _argument(data_set, builder, spec, sizes, sources.get(name, {"type": "random"}))
        for name, spec in inputs.items()
    }
    calls = []
    for op, args, kwargs in calls_of_kernel(definition, arguments, data_set.recording):
        call = registered(op, args, kwargs, data_set.file.losses)
        if not schemas_of(call.op):
            raise NoOverload(f"the operator {op[:60]} is not registered in this torch")
        calls.append((call.op, call.args, call.kwargs))
    return calls


def _sizes(definition: Mapping[str, Any], workload: Mapping[str, Any]) -> dict[str, int]:
    axes, values = definition.get("axes"), workload.get("axes")
    if not isinstance(axes, dict) or not isinstance(values, dict):
        raise NoCall("`axes` of the definition or workload is not a JSON object")
    sizes: dict[str, int] = {}
    for name, axis in axes.items():
        size = values.get(name)
        if isinstance(axis, dict) and axis.get("type") == "const":
            size = axis.get("value")
        if isinstance(axis, dict) and axis.get("type") == "expr":
            size = _size_of(axis.get("expression"), sizes | values)
        if size is None:
            raise NoCall(f"no workload has the size of the axis {name[:40]}")
        if type(size) is not int or not 0 <= size < LARGEST:
            raise NoCall(f"the size of the axis {name[:40]} is not a number of elements: {str(size)[:40]}")
        sizes[name] = size
    return sizes


def _size_of(expression: Any, sizes: Mapping[str, Any]) -> int:
    integer_sizes = {name: size for name, size in sizes.items() if type(size) is int}
    try:
        return size_of(expression, integer_sizes)
    except (ValueError, TypeError) as error:
        raise NoCall(f"the size of an axis cannot be computed from {str(expression)[:60]!r}") from error


def _argument(
    data_set: DataSet, builder: RecordBuilder, spec: Any, sizes: Mapping[str, int], source: Any
) -> TensorSpec | bool | int | float:
    """Return one input of a kernel as an argument: a number, or a tensor, with a value model if its values are
    stored.
    """
    if not isinstance(spec, dict) or not isinstance(source, dict):
        raise NoCall("an input of the definition or workload is not a JSON object")
    names = spec.get("shape")
    if names is None:
        value = source.get("value") if source.get("type") == "scalar" else None
        if not isinstance(value, bool | int | float) or abs(value) >= LARGEST:
            raise NoCall("the workload has no value for an input that is a number")
        return value
    dtype = DTYPES.get(str(spec.get("dtype")))
    if dtype is None:
        raise NoCall(f"unknown dtype: {str(spec.get('dtype'))[:40]}")
    if not isinstance(names, list) or len(names) > 64 or not all(isinstance(name, str) for name in names):
        raise NoCall(f"the shape of an input is not a list of axes: {str(names)[:40]}")
    if unknown := [name for name in names if name not in sizes]:
        raise NoCall(f"the shape of an input has the undefined axis {unknown[0][:40]}")
    shape = tuple(sizes[name] for name in names)
    tensor = TensorSpec(shape, contiguous(shape), dtype, "cpu")
    if source.get("type") == "custom" and CUSTOM not in data_set.file.losses.defaults:
        data_set.file.losses.defaults.append(CUSTOM)
    if source.get("type") != "safetensors":
        return tensor
    return _with_values(data_set, builder, tensor, source)


def _with_values(
    data_set: DataSet, builder: RecordBuilder, tensor: TensorSpec, source: Mapping[str, Any]
) -> TensorSpec:
    """Return a tensor with a value model of its stored values, or without one if they cannot be read."""
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
    """Return the number of a value model of stored values, or None if no model fits.

    Raise `FormatError` if the values cannot be read or do not match `tensor`.
    """
    root = data_set.root
    path = None if root is None else root / name
    if path is None or root is None or not path.resolve().is_relative_to(root.resolve()):
        raise FormatError("the file is not in the folder of the definitions")
    if data_set.stored_bytes > STORED_BYTES and not data_set.file.unbounded:
        raise FormatError(
            f"the files read before hold {STORED_BYTES >> 30} GB of values, the limit: allow more with --unbounded"
        )
    values = read_foreign_tensor(path, key)
    data_set.stored_bytes += values.nbytes
    if values.shape != tensor.shape or values.dtype != tensor.dtype:
        raise FormatError(f"its tensor {key[:60]} does not have the shape and dtype in the definition")
    model = fit_values(values)
    return None if model is None else builder.add_values(model)


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
