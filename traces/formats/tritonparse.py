"""Reader of Triton kernel launches in tritonparse's logs, which are raw or parsed JSON Lines.

    {"event_type": "compilation", "payload": {"metadata": {"hash": "7f"}, "python_source": {"file_path": "/a/k.py"}}}
    {"event_type": "launch", "name": "add", "grid": [4], "compilation_metadata": {"hash": "7f", "num_warps": 4},
     "extracted_args": {"x_ptr": {"type": "tensor", "shape": [64], "dtype": "torch.float32", "stride": [1]}}}

A launch names the kernel's arguments; the compilation with the same hash has the kernel's file and text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import PurePath
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.traces.formats.building import NO_GRADIENTS, NO_TIMES, NO_VALUES, RecordBuilder, split, tensor_of
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, formats
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.operator_arguments import LARGEST, MOST_DIMENSIONS, TYPES, launch_keywords
from opgrip.traces.schema.records import EXTENSION, Record, Scope

EVENT = re.compile(rb'"event_type"\s*:\s*"[a-z_]+"')
# pattern of a kernel parameter that is a compile-time constant
CONSTANT = re.compile(r"(\w+)\s*:\s*['\"]?(?:\w+\.)*constexpr\b")
LAUNCHING = re.compile(r".*[/\\]triton[/\\]runtime[/\\](jit|autotuner)\.py")
OPTIONS = ("num_warps", "num_stages", "num_ctas")  # compiler options that a replay passes to Triton
MOST_LAUNCHES = 1_000_000
MOST_SOURCES = 20_000
MOST_CALLERS = 50
TRIED = "launched by Triton's autotuner, to try a configuration"
NO_LAUNCHES = "the file only has its compilation: log launches too, by init(path, enable_trace_launch=True)"
# Triton's short names of types that `TYPES` lacks
TYPE_NAMES = {"fp16": "float16", "fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "int1": "bool"}
DTYPES = {name: dtype for dtype, name in TYPES.items()} | {
    short: getattr(torch, name) for short, name in TYPE_NAMES.items()
}


@dataclass(frozen=True, slots=True)
class KernelSource:
    name: str
    module: str
    constants: frozenset[str] = field(default_factory=frozenset)


def recognizes(head: Head) -> bool:
    first = head.start.partition(b"\n")[0]
    return first.startswith(b"{") and EVENT.search(first) is not None


def read(file: ForeignFile) -> Iterator[Record]:
    builder = RecordBuilder("tritonparse", file.losses)
    sources: dict[str, KernelSource] = {}
    launches = 0
    for line in file.lines():
        if '"compilation"' not in line and '"launch"' not in line:
            continue
        try:
            event = file.parse(line)
        except UserError:
            # processes that share a log write into each other's lines
            file.losses.skip("?", "a line is not JSON")
            continue
        match event:
            case {"event_type": "compilation", "payload": dict() as payload} if len(sources) < MOST_SOURCES:
                sources |= _source(payload)
            case {"event_type": "launch"}:
                launches += 1
                file.check(launches, MOST_LAUNCHES, "it has more than {:,} launches")
                name = str(event.get("name"))[:200]
                with builder.skipping(name):
                    _add_launch(builder, name, event, sources)
                yield from builder.ready()
    if not launches:
        for source in sources.values():
            file.losses.skip(source.name, NO_LAUNCHES)
    yield from builder.end()


def _source(payload: Mapping[str, Any]) -> dict[str, KernelSource]:
    match payload:
        case {"metadata": {"hash": str() as key}, "python_source": {"file_path": str() as path, **rest}}:
            code = rest.get("code")
            constants = CONSTANT.findall(code) if isinstance(code, str) else []
            name = str(payload["metadata"].get("name"))[:200]
            return {key: KernelSource(name, PurePath(path).stem, frozenset(constants))}
    return {}


def _add_launch(
    builder: RecordBuilder, name: str, event: Mapping[str, Any], sources: Mapping[str, KernelSource]
) -> None:
    frames = _frames(event.get("stack"))
    if event.get("autotune_launch_type") == "benchmark" or any(
        function == "_bench" and LAUNCHING.fullmatch(file) for file, _, function in frames
    ):
        raise ValueError(TRIED)
    arguments, metadata, grid = (event.get(key) for key in ("extracted_args", "compilation_metadata", "grid"))
    if not isinstance(arguments, dict) or not isinstance(metadata, dict):
        raise ValueError("the launch has no extracted_args or no compilation_metadata")
    if not isinstance(grid, list) or not 1 <= len(grid) <= MOST_DIMENSIONS:
        raise ValueError(f"the grid of the launch is not a list of 1 to {MOST_DIMENSIONS} sizes")
    if not all(type(size) is int and 0 <= size <= LARGEST for size in grid):
        raise ValueError(f"the grid of the launch has a size that is not an integer up to {LARGEST:,}")
    # Triton's code that launches kernels is not part of the program
    program = list(takewhile(lambda frame: not LAUNCHING.fullmatch(frame[0]), frames))
    unknown = KernelSource(name, PurePath(program[-1][0]).stem if program else "")
    source = sources.get(str(metadata.get("hash")), unknown)
    values = {key: _value(key, form) for key, form in arguments.items()}
    constants = {key: value for key, value in values.items() if key in source.constants}
    if any(isinstance(value, TensorSpec) for value in constants.values()):
        raise ValueError("a tensor is passed for a constexpr argument of the kernel")
    running = tuple(value for key, value in values.items() if key not in constants)
    options = {key: metadata[key] for key in OPTIONS if type(metadata.get(key)) is int}
    args, kwargs, _, _ = split(running, launch_keywords(tuple(grid), constants, options), None)
    thread = f"process {event['pid']}" if type(event.get("pid")) is int else "main"
    builder.add_call(f"{source.module}:{name}", args, kwargs, kind=EXTENSION, scope=_scope(program), thread=thread)


def _value(name: str, form: Any) -> Any:
    match form:
        case {"type": "tensor", "shape": shape, "dtype": dtype, "device": device, **rest}:
            tensor = tensor_of(shape, dtype, rest.get("stride"), device, rest.get("storage_offset", 0))
            return replace(tensor, storage=_memory_of(tensor, rest.get("data_ptr")))
        case {"type": "int" | "float" | "bool" | "str", "value": bool() | int() | float() | str() as value}:
            if type(value) is int and not -(1 << 63) <= value < 1 << 64:
                raise ValueError(f"the kernel's argument {name[:60]} has more than 64 bits: {str(value)[:40]}")
            return value
        case {"type": "NoneType"}:
            return None
        case {"type": "dtype", "repr": str() as text} if text in DTYPES:
            return DTYPES[text]
        case {"type": str() as kind}:
            raise ValueError(f"the file does not have the value of the kernel's argument {name[:60]}, a {kind[:60]}")
    raise ValueError(f"the kernel's argument {name[:60]} has no type: {str(form)[:40]}")


def _memory_of(tensor: TensorSpec, address: Any) -> int | None:
    if not isinstance(address, str) or not re.fullmatch(r"0x[0-9a-f]{2,16}", address):
        return None
    return int(address, 16) - tensor.offset * tensor.dtype.itemsize


def _frames(stack: Any) -> list[tuple[str, int, str]]:
    frames = []
    for form in stack[-MOST_CALLERS:] if isinstance(stack, list) else ():
        match form:
            case {"filename": str() as file, "line": int() as line, "name": str() as function} if 0 <= line < 1 << 31:
                frames.append((file, line, function))
    return frames


def _scope(frames: list[tuple[str, int, str]]) -> Scope:
    if not frames:
        return Scope(0, "", "", "forward")
    *callers, (file, line, function) = frames
    around = tuple(f"{name}:{number} {caller}" for name, number, caller in reversed(callers))
    return Scope(0, "", "", "forward", function=function, file=file, line=line, callers=around)


formats.register("tritonparse")(
    Format(
        "tritonparse's launches of Triton kernels: JSON Lines",
        recognizes,
        read,
        defaults=(NO_TIMES, NO_VALUES, NO_GRADIENTS),
    )
)
