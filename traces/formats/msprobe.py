"""Reader of msProbe's `dump.json`: calls of torch's Python functions, and statistics of their tensors.

    {"task": "statistics", "level": "L1", "framework": "pytorch", "data": {"Functional.relu.0.forward": {
      "input_args": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3], "Max": 1, "Min": 0,
                      "Mean": 0.5, "Norm": 1.4, "requires_grad": false}],
      "input_kwargs": {}, "output": []}}}

A function becomes the operator with the same name, or the operators that it calls on meta tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from opgrip.traces.formats.building import NO_DEVICE, NO_TIMES, RecordBuilder, model_of_moments, tensor_of
from opgrip.traces.formats.configurations.modules import MetaRecording, Recorded
from opgrip.traces.formats.node_calls import model_of
from opgrip.traces.formats.tensor_functions import CONSTANTS, OPERATOR_METHODS, run_function
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, formats
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Record
from opgrip.traces.values import ValueModel

NAME = re.compile(r"(\w+)\.(\w+)\.\d+\.(forward|backward)")
START = re.compile(rb'\s*\{\s*"task"\s*:\s*"\w+"\s*,\s*"level"\s*:\s*"\w+"')
# torch's modules by the first part of a call's name
PATHS = {"Functional": "torch.nn.functional", "Torch": "torch", "Tensor": "torch.Tensor", "Aten": "torch.ops.aten"}
MOST_CALLS = 1_000_000
MODULES = "a module: with level L0 the file does not have the functions that it calls"
BACKWARD = "a backward pass, whose operators the file does not name"
CONTIGUOUS = "strides of tensors: the file has none, so they are contiguous"
VALUES = "values of tensors: drawn with the file's minima, maxima, means and norms"


def recognizes(head: Head) -> bool:
    return START.match(head.start) is not None and b'"data"' in head.start


def read(file: ForeignFile) -> Iterator[Record]:
    """Yield the records of a trace with the operators of each forward call in order."""
    form = file.json()
    calls = form.get("data") if isinstance(form, dict) else None
    if not isinstance(calls, dict):
        raise file.damage("it has no calls")
    builder = RecordBuilder("msprobe", file.losses)
    recording = MetaRecording("cpu", file.unbounded)
    if len(calls) > MOST_CALLS and not file.unbounded:
        raise file.refusal(f"it has more than {MOST_CALLS:,} calls")
    for name, call in calls.items():
        if name.startswith(("Module.", "Cell.")):
            if form.get("level") == "L0":
                file.losses.skip(".".join(name.split(".")[:-2])[:200], MODULES)
            continue
        match = NAME.fullmatch(name)
        op = f"{match[1]}.{match[2]}"[:200] if match else name[:200]
        try:
            for recorded in _calls(match, call, recording, builder):
                builder.add_call(recorded.op, recorded.args, recorded.kwargs)
        except (ValueError, RecursionError) as error:
            file.losses.skip(op, str(error)[:300])
        yield from builder.ready()
    yield from builder.end()


def _calls(name: re.Match[str] | None, call: Any, recording: MetaRecording, builder: RecordBuilder) -> list[Recorded]:
    """Return the operators that a call in the dump runs; raise `ValueError` if they cannot be determined."""
    if name is None or not isinstance(call, dict):
        raise ValueError(
            "the name of the entry is not SPACE.FUNCTION.NUMBER.forward or backward, or its value is not a JSON object"
        )
    space, function, phase = name.groups()
    if phase == "backward":
        raise ValueError(BACKWARD)
    if space not in PATHS:
        raise ValueError(f"the called function is not one of torch but of {space[:40]}")
    positional, named = call.get("input_args", []), call.get("input_kwargs", {})
    if not isinstance(positional, list) or not isinstance(named, dict):
        raise ValueError("input_args is not a list, or input_kwargs not an object")
    named = {key: _value(form, builder) for key, form in named.items()}
    args, kwargs = recording.tensors([_value(positional, builder), named])
    with torch.no_grad(), recording.running() as calls:
        if function in OPERATOR_METHODS:
            OPERATOR_METHODS[function](*(tuple(arg) if isinstance(arg, list) else arg for arg in args))
        else:
            run_function(f"{PATHS[space]}.{function}", recording, args, kwargs)
    return calls


def _value(form: Any, builder: RecordBuilder) -> Any:
    """Return the argument that a JSON value of the dump describes; raise `ValueError` if the dump lacks its value."""
    match form:
        case None:
            return None
        case list():
            return [_value(item, builder) for item in form]
        case {"type": "torch.Tensor" | "torch.nn.parameter.Parameter", "shape": shape, "dtype": dtype, **facts}:
            tensor = tensor_of(shape, dtype, requires_grad=facts.get("requires_grad"))
            model = _model(tensor, facts)
            return tensor if model is None else replace(tensor, values=builder.add_values(model))
        case {"type": "int" | "float" | "bool" | "str", "value": bool() | int() | float() | str() as value}:
            return value
        case {"type": "torch.Size", "value": list() as sizes}:
            return [_value({"type": "int", "value": size}, builder) for size in sizes]
        case {"type": "slice", "value": [*parts]} if all(type(part) in (int, type(None)) for part in parts):
            return slice(*parts)
        case {"type": "ellipsis"}:
            return ...
        case {"type": "torch.dtype", "value": str() as text} if text in CONSTANTS:
            return CONSTANTS[text]
        case {"type": "torch.memory_format", "format": str() as text} if f"torch.{text}" in CONSTANTS:
            return CONSTANTS[f"torch.{text}"]
        case {"type": "torch.device"}:
            return torch.device("meta")
        case {"type": str() as kind}:
            raise ValueError(f"the file does not have the value of a {kind[:60]}")
    raise ValueError(f"an argument is not null, a list or an object with its type: {str(form)[:60]}")


def _model(tensor: TensorSpec, facts: Mapping[Any, Any]) -> ValueModel | None:
    """Return a value model with the statistics of a tensor, or None if these are not numbers or contradictory."""
    high, low, mean, norm = [facts.get(name, math.nan) for name in ("Max", "Min", "Mean", "Norm")]
    count = math.prod(tensor.shape)
    try:
        if not tensor.dtype.is_floating_point:
            return model_of((int(low), int(high)), tensor)
        # the norm is the root of the sum of squares
        std = math.sqrt(max(norm**2 / count - mean**2, 0.0))
        return model_of_moments(mean, std, low, high)
    except (TypeError, ValueError, ArithmeticError):
        return None


formats.register("msprobe")(
    Format(
        "msProbe's dumps of the calls of a program: JSON, with statistics of tensors",
        recognizes,
        read,
        defaults=(NO_TIMES, VALUES, NO_DEVICE, CONTIGUOUS),
    )
)
