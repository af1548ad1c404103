"""Models made by a callable of the user: `package.module:factory`, `path/to/file.py:factory` or `builtin:NAME`."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from opgrip.capture.models.program import ModelProgram, load_weights
from opgrip.capture.models.sources import FACTORY, PREFIX, RUNS_OF_ALL, ModelOptions, builtin_models
from opgrip.cli.command import did_you_mean, listed
from opgrip.errors import UserError, cause_of, place_of
from opgrip.platform.machine import check_device

LEARNING_RATE = 1e-3
CHANNELS = 3  # number of channels of the images that are generated for a factory that returns only a module
SIZES = ("batch_size", "input_size", "sequence_length")


def load_factory(text: str, options: ModelOptions, source: str = "") -> ModelProgram:
    if options.cfg_options:
        raise UserError("--cfg-options is for OpenMMLab and transformers configs", f"{text} takes none")
    match = FACTORY.fullmatch(text)
    assert match is not None, "each source is only asked for models that it matches"
    device = check_device(options.device)
    model, inputs = _build(source or text, _find(text, match["where"], match["name"]), options)
    if options.checkpoint is not None:
        load_weights(model, options.checkpoint)
    model.to(device)
    inputs = tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, inputs)
    return program_of(model, inputs, options.run, match["name"].rpartition(".")[2], {"source": source or text})


def program_of(
    model: nn.Module, inputs: Any, run: str, name: str, details: Mapping[str, Any] = MappingProxyType({})
) -> ModelProgram:
    if run not in RUNS_OF_ALL:
        raise UserError(f"--run {run} does not apply to a module", f"choose {listed(RUNS_OF_ALL)}")
    return ModelProgram(
        name=name,
        model=model,
        inputs=lambda: copy.deepcopy(inputs),
        step=_step(model, run),
        details={**details, "class": type(model).__qualname__},
    )


def _find(text: str, where: str, name: str) -> Callable[..., Any]:
    module = _module_of_file(Path(where)) if where.endswith(".py") else _module_of_name(where)
    factory: Any = module
    for part in name.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        names = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        hint = did_you_mean(name, names, f"{text} must name one of its functions")
        raise UserError(f"no factory {name!r} in {where}", hint)
    return factory  # type: ignore[no-any-return]


def _module_of_name(name: str) -> ModuleType:
    # find a user's file in the current folder, as `python -m` does
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{name} cannot be imported ({error})", "install it, or name a file: path/to/file.py:factory"
        ) from error
    except Exception as error:
        raise UserError(f"{name} fails when it is imported", cause_of(error)) from error
    finally:
        sys.path.remove("")


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = did_you_mean(str(path), [str(other) for other in path.parent.glob("*.py")])
        raise UserError(f"no file {path}", near or "name one as path/to/file.py:factory")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} fails when it is run", cause_of(error)) from error
    return module


def _build(text: str, factory: Callable[..., Any], options: ModelOptions) -> tuple[nn.Module, Any]:
    option_values = {name: getattr(options, name) for name in (*SIZES, "run")}
    try:
        parameters = dict(inspect.signature(factory).parameters)
    except ValueError:
        # builtins have no signature
        parameters = {}
    settings = {name: value for name, value in option_values.items() if name in parameters and value is not None}
    unused = [name for name in SIZES if option_values[name] is not None and name not in parameters]
    if "input_size" not in unused:
        _refuse(unused, text)
    try:
        built = factory(**settings)
    except (Exception, SystemExit) as error:
        raise UserError(f"{text} failed{place_of(error)}", cause_of(error)) from error
    if isinstance(built, nn.Module) and options.input_size is not None and options.sequence_length is None:
        # a factory of another package, such as torchvision.models:resnet18
        return built, torch.rand(options.batch_size or 1, CHANNELS, *options.input_size)
    _refuse(unused, text)
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
        hint = "it must return a module and its inputs"
        if isinstance(built, nn.Module):
            hint += ", or name the size of images with --input-size"
        raise UserError(f"{text} returned {type(built).__name__}", hint)
    return built


def _refuse(unused: Sequence[str], text: str) -> None:
    if unused:
        flag = unused[0].replace("_", "-")
        raise UserError(f"--{flag} does not apply to {text}", f"give the factory a parameter {unused[0]}")


def _step(model: nn.Module, run: str) -> Callable[[Any], Any]:
    def call(inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)

    if run == "predict":
        model.eval()
        return torch.no_grad()(call)

    model.train()

    def loss(inputs: Any) -> torch.Tensor:
        return total_loss(call(inputs))

    if run == "loss":
        return loss
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"{type(model).__qualname__} has no parameters to train", "choose --run predict or loss")
    return train_step(loss, *_optimizers(model))


def _optimizers(model: Any) -> Sequence[torch.optim.Optimizer]:
    if not hasattr(model, "configure_optimizers"):
        return (torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9),)
    optimizers = model.configure_optimizers()
    optimizers = optimizers if isinstance(optimizers, list | tuple) else (optimizers,)
    if optimizers and all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
        return optimizers
    raise UserError(
        f"configure_optimizers of {type(model).__qualname__} returns no optimizers", "return one, or a list of them"
    )


def train_step(
    loss: Callable[[Any], torch.Tensor], *optimizers: torch.optim.Optimizer
) -> Callable[[Any], torch.Tensor]:
    """Return a function that runs a training step: loss, backward pass, and a step of each optimizer."""

    def train(inputs: Any) -> torch.Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = loss(inputs)
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        return value.detach()

    return train


def total_loss(output: Any) -> torch.Tensor:
    """Return the loss in the output of a model: a tensor, an object with `loss`, or a dictionary of losses."""
    if isinstance(getattr(output, "loss", None), torch.Tensor):
        output = output.loss
    if isinstance(output, Mapping):
        losses = [value.mean() for value in output.values() if isinstance(value, torch.Tensor) and value.requires_grad]
        output = sum(losses) if losses else None
    if isinstance(output, torch.Tensor) and output.requires_grad:
        return output if output.dim() == 0 else output.mean()
    raise UserError(
        "the model returned no loss",
        "for --run loss and train it must return a tensor, a dictionary of losses, or an object with .loss",
    )


def load_builtin(text: str, options: ModelOptions) -> ModelProgram:
    name = text.removeprefix(PREFIX)
    names = builtin_models()
    if name not in names:
        hint = did_you_mean(name, names, "choose " + ", ".join(PREFIX + other for other in names), f"{PREFIX}{{}}")
        raise UserError(f"no built-in model {name!r}", hint)
    return load_factory(f"opgrip.samples.models.{name}:{name}", options, text)
