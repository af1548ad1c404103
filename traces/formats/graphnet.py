"""Samples of GraphNet: a model's graph as code that torch.fx generated, and its tensors' shapes and moments.

    model.py        class GraphModule(torch.nn.Module):
                        def forward(self, L_x_: torch.Tensor, ...):
    weight_meta.py  class Program_weight_tensor_meta_L_x_:
                        name = "L_x_"
                        shape = [1, 3, 224, 224]

A sample is a folder, or a folder of `subgraph_N`. Both files are text here: neither is imported, compiled or evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from opgrip.traces.formats.building import (
    NO_GRADIENTS,
    NO_TIMES,
    RecordBuilder,
    fit_values,
    model_of_moments,
    tensor_of,
)
from opgrip.traces.formats.configurations.modules import MetaRecording
from opgrip.traces.formats.node_calls import model_of
from opgrip.traces.formats.tensor_programs import TensorProgram, Unconverted
from opgrip.traces.io.foreign_files import ForeignFile, Format, Head, formats
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Record, Scope
from opgrip.traces.values import ValueModel

PROGRAM = "model.py"
TENSORS = ("input_meta.py", "weight_meta.py")
FORWARD = re.compile(rb"class GraphModule\(torch\.nn\.Module\):\s+def forward\(")
MEMBER = re.compile(r"\s+(\w+)\s*=\s*(.*)")
FACTS = ("name", "shape", "dtype", "device", "mean", "std", "min_val", "max_val", "data")
MOST_BYTES = 16 << 20
MOST_FACT = 1 << 20
"""Characters of one fact; longer ones are values of large tensors."""
MOST_TENSORS = 50_000
MOST_GRAPHS = 1000
SPREAD = 4
"""Standard deviations between the mean and the bounds of drawn values."""
NO_RANGE = "values of tensors: normal numbers with the file's means and standard deviations; those of results as needed"


def recognizes(head: Head) -> bool:
    if head.path.is_dir():
        return bool(_graphs(head.path))
    return head.path.name == PROGRAM and FORWARD.search(head.start) is not None


def _graphs(path: Path) -> list[Path]:
    """Return the folders of the graphs of a sample."""
    folders = (path, *sorted(islice(path.glob("subgraph_*"), MOST_GRAPHS)))
    return [folder for folder in folders if all((folder / name).is_file() for name in (PROGRAM, TENSORS[1]))]


def read(file: ForeignFile) -> Iterator[Record]:
    """Yield the operators of each graph in order."""
    builder = RecordBuilder("graphnet", file.losses)
    recording = MetaRecording("cpu", file.unbounded)
    for folder in _graphs(file.path) if file.path.is_dir() else [file.path.parent]:
        program_file = ForeignFile(folder / PROGRAM, file.losses, file.unbounded)
        inputs = {name: item for meta in TENSORS for name, item in _inputs(folder / meta, file, builder).items()}
        try:
            program = TensorProgram(program_file.content(MOST_BYTES).decode(errors="replace"), recording)
            known = {name: inputs[name] for name in program.parameters("forward") if name in inputs}
        except ValueError as error:
            raise program_file.damage(str(error)) from error
        tensors = {name: tensor for name, (tensor, _) in known.items()}
        numbers = {name: number for name, (_, number) in known.items() if number is not None}
        for line, call in program.calls("forward", tensors, numbers):
            if isinstance(call, Unconverted):
                file.losses.skip(call.op, call.reason)
                continue
            where = f"{folder.name}/{PROGRAM}" if folder.name else PROGRAM
            scope = Scope(0, "", "", "forward", function="forward", file=where, line=line)
            builder.add_call(call.op, call.args, call.kwargs, scope=scope)
            yield from builder.ready()
    yield from builder.end()


def _inputs(path: Path, file: ForeignFile, builder: RecordBuilder) -> dict[str, tuple[TensorSpec, Any]]:
    """Return the tensors that a file describes by name, each with its value if it has one element.

    It is empty if there is no such file.
    """
    if not path.is_file():
        return {}
    inputs: dict[str, tuple[TensorSpec, Any]] = {}
    for facts in _classes(ForeignFile(path, file.losses, file.unbounded)):
        name = str(facts.get("name"))
        try:
            tensor = tensor_of(facts.get("shape"), facts.get("dtype"))
            model = _model(tensor, facts)
        except (ValueError, TypeError) as error:
            file.losses.skip(f"input {name[:100]}", str(error)[:200])
            continue
        tensor = tensor if model is None else replace(tensor, values=builder.add_values(model))
        inputs[name] = tensor, facts.get("mean") if tensor.shape in ((), (1,)) else None
        if len(inputs) > MOST_TENSORS and not file.unbounded:
            raise file.refusal(f"it describes more than {MOST_TENSORS:,} tensors")
    return inputs


def _classes(file: ForeignFile) -> Iterator[dict[str, Any]]:
    """Yield the assignments of each class of a file; a list may continue on the next lines."""
    facts: dict[str, Any] = {}
    name = text = ""
    for line in file.lines():
        if line.startswith("class "):
            if facts:
                yield facts
            facts, name = {}, ""
        elif member := MEMBER.fullmatch(line):
            name, text = member[1], member[2]
        elif name:
            text += line.strip()
        if name in FACTS and len(text) <= MOST_FACT and (value := _literal(text)) is not ...:
            facts[name], name = value, ""
    if facts:
        yield facts


def _literal(text: str) -> Any:
    """Return a number, string, list or None, or an ellipsis for a text that is not one, or not yet."""
    text = text.strip().removeprefix("(").strip()
    text = text[:-1].strip() if text.endswith(")") else text
    if not text or (text.startswith("[") and not text.endswith("]")):
        return ...
    try:
        return None if text == "None" else json.loads(re.sub(r",\s*\]$", "]", text).replace("'", '"'))
    except (ValueError, RecursionError):
        return ...


def _model(tensor: TensorSpec, facts: Mapping[str, Any]) -> ValueModel | None:
    """Return a model of a tensor's values; raise `ValueError` or `TypeError` if the facts cannot be its values'."""
    data, mean, std, low, high = (facts.get(name) for name in ("data", "mean", "std", "min_val", "max_val"))
    if isinstance(data, list) and len(data) == torch.Size(tensor.shape).numel() > 0:
        return fit_values(torch.tensor(data, dtype=tensor.dtype).reshape(tensor.shape))
    if not tensor.dtype.is_floating_point:
        return None if low is None or high is None else model_of((low, high), tensor)
    if not isinstance(mean, int | float) or not isinstance(std, int | float):
        return None
    return model_of_moments(mean, std, mean - SPREAD * std, mean + SPREAD * std)


formats.register("graphnet")(
    Format(
        "GraphNet's samples: a folder with generated code and its tensors",
        recognizes,
        read,
        defaults=(NO_TIMES, NO_RANGE, NO_GRADIENTS),
    )
)
