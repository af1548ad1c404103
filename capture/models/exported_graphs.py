"""Models exported as graphs: programs saved by `torch.export.save`, and samples of GraphNet."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_map_only, tree_unflatten

from opgrip.capture.models.factory import program_of
from opgrip.capture.models.program import ModelProgram, load_weights
from opgrip.capture.models.sources import ModelOptions
from opgrip.cli.options import flag_of
from opgrip.errors import UserError, cause_of, place_of
from opgrip.platform.machine import check_device

PROGRAM, TENSORS, INPUTS, FACTS = "model.py", "weight_meta.py", "input_meta.py", "graph_net.json"
_OPTIONS_OF_INPUTS = ("batch_size", "input_size", "cfg_options")


def load_exported(text: str, options: ModelOptions) -> ModelProgram:
    for option in _OPTIONS_OF_INPUTS:
        if getattr(options, option):
            raise UserError(f"{flag_of(option)} does not apply to {text}", "the shapes of its inputs are in the file")
    path, device = Path(text), check_device(options.device)
    model, inputs = _read_sample(path, device) if path.is_dir() else _read_program(path, device)
    if options.checkpoint is not None:
        load_weights(model, options.checkpoint)
    # the loss of a graph with several results is the sum of their means
    model.register_forward_hook(lambda _, __, result: dict(enumerate(result)) if isinstance(result, tuple) else result)
    return program_of(model, inputs, options.run, path.resolve().stem, {"source": text})


def _read_program(path: Path, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"no file {path}", "name one that torch.export.save wrote")
    try:
        program = torch.export.load(path)
        args, kwargs = program.example_inputs or _inputs_of_placeholders(program)
        model = move_to_device_pass(program, str(device)).module()
    except Exception as error:
        hint = f"export it again with torch {torch.__version__}: {cause_of(error)}"
        raise UserError(f"{path} is not a program that torch.export can load", hint) from error
    # these only raise in an exported module: its graph has no modes
    vars(model).pop("train", None)
    vars(model).pop("eval", None)
    # a program's inputs are one dictionary; first, because a hook of the exported module checks the inputs
    model.register_forward_pre_hook(
        lambda _, __, inputs: (inputs["args"], inputs["kwargs"]), prepend=True, with_kwargs=True
    )
    inputs = {"args": tuple(args), "kwargs": dict(kwargs)}
    return model, tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)


def _inputs_of_placeholders(program: torch.export.ExportedProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    values = []
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in program.graph_signature.user_inputs:
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                value = _tensor(value.dtype, [int(size) for size in value.shape])
            values.append(value)
    return tree_unflatten(values, program.call_spec.in_spec)  # type: ignore[no-any-return]


def _read_sample(folder: Path, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    _check_sample(folder)
    metas = [vars(meta) for name in (TENSORS, INPUTS) for meta in _classes_of(folder / name) if "shape" in vars(meta)]
    # GPU of the sample if its tensors were on one; tensors on the CPU stay there then
    own = next((str(meta.get("device")) for meta in metas if meta.get("device") not in (None, "cpu")), "cpu")
    own_type = own.partition(":")[0]
    text = _on_device((folder / PROGRAM).read_text(encoding="utf-8"), own_type, device)
    module = _run(folder / PROGRAM, text)
    if not isinstance(getattr(module, "GraphModule", None), type):
        raise UserError(f"{folder / PROGRAM} defines no GraphModule", "name a folder that graph_net.torch wrote")
    model = module.GraphModule()
    parameters = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {}
    for meta in metas:
        name = str(meta.get("name"))
        if name not in parameters:
            continue
        try:
            tensor = _values(meta)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise UserError(f"{folder} describes the tensor {name} wrongly", cause_of(error)) from error
        if str(meta.get("device")).startswith(own_type):
            tensor = tensor.to(device)
        annotation = str(parameters[name].annotation)
        if "Parameter" in annotation:
            model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
        else:
            inputs[name] = tensor.item() if "SymInt" in annotation else tensor
    weights = dict(model.named_parameters())
    if missing := parameters.keys() - inputs.keys() - weights.keys():
        raise UserError(f"{folder} does not describe the input {min(missing)}", f"add it to {TENSORS}")
    model.register_forward_pre_hook(lambda _, __, inputs: ((), {**inputs, **weights}), with_kwargs=True)
    return model, inputs


def _check_sample(folder: Path) -> None:
    for name in (PROGRAM, TENSORS):
        if not (folder / name).is_file():
            parts = sorted(str(path.parent) for path in folder.glob(f"*/{PROGRAM}"))
            raise UserError(
                f"{folder} is not a GraphNet sample: it has no {name}",
                f"name a folder in it, such as {parts[0]}" if parts else "name a folder that graph_net.torch wrote",
            )
    try:
        framework = json.loads((folder / FACTS).read_bytes())["framework"]
    except FileNotFoundError:
        return
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder / FACTS} cannot be read", cause_of(error)) from error
    if framework != "torch":
        raise UserError(f"{folder} is a sample for {framework}", "name one for torch")


def _classes_of(path: Path) -> list[type]:
    if not path.is_file():
        return []
    module = _run(path, path.read_text(encoding="utf-8"))
    return [value for value in vars(module).values() if isinstance(value, type)]


def _run(path: Path, text: str) -> ModuleType:
    module = ModuleType(path.stem)
    try:
        exec(compile(text, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} fails when it is run{place_of(error)}", cause_of(error)) from error
    return module


def _on_device(text: str, own_type: str, device: torch.device) -> str:
    text = re.sub(rf"device\(type=(['\"]){own_type}\1(, index=\d+)?\)", f"device({str(device)!r})", text)
    return re.sub(rf"(['\"]){own_type}(:\d+)?\1", lambda match: repr(str(device) if match[2] else device.type), text)


def _values(meta: Mapping[str, Any]) -> torch.Tensor:
    shape, dtype = meta["shape"], getattr(torch, meta["dtype"].removeprefix("torch."))
    low, high = meta.get("min_val"), meta.get("max_val")
    if isinstance(meta.get("data"), list):
        return torch.tensor(meta["data"], dtype=dtype).reshape(shape)
    if not dtype.is_floating_point:
        return _tensor(dtype, shape) if low is None or high is None else torch.randint(low, high + 1, shape).to(dtype)
    tensor = torch.randn(shape) * (meta.get("std") or 0.0) + (meta.get("mean") or 0.0)
    if "running_var" in meta["name"]:
        # a variance is not negative
        tensor = tensor.abs()
    return (tensor if low is None and high is None else tensor.clamp(low, high)).to(dtype)


def _tensor(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    # integers are 0, which is valid as an index of any table
    return torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
