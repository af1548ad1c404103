"""Interface of model sources: their options, and the program that they return for a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import did_you_mean, listed, not_negative, positive
from opgrip.cli.option_types import image_size
from opgrip.cli.options import flag_of, option, titled
from opgrip.cli.plugins import Registry
from opgrip.errors import MissingFileError, UserError, shortened

if TYPE_CHECKING:
    from torch import nn


# pattern of torch's message for a class that its safe loader rejects
_UNSUPPORTED = re.compile(r"Unsupported (?:global|class)\W.*?GLOBAL (\S+)")


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a module's weights from a file with torch's safe loader, which runs no code from the file."""
    import torch

    if not path.is_file():
        near = did_you_mean(str(path), [str(other) for other in path.parent.glob(f"*{path.suffix}")])
        raise MissingFileError(f"the file of weights {path} does not exist", near or "name one with --checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        refused = _UNSUPPORTED.search(str(error))
        reason = f": it contains {refused[1]}, which torch does not load as weights" if refused else ""
        raise UserError(f"{path} is not a file of weights{reason}", "save a state_dict with torch.save") from error
    state = state.get("state_dict", state) if isinstance(state, Mapping) else state
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = shortened(" ".join(str(error).split()), 300)
        raise UserError(
            f"{path} does not fit {type(model).__name__}", f"choose a checkpoint of this model: {reason}"
        ) from error


RUNS_OF_ALL = (PREDICT, LOSS, TRAIN) = ("predict", "loss", "train")  # kinds of steps that every model supports
GENERATE = "generate"
RUNS = (*RUNS_OF_ALL, GENERATE)  # all kinds of steps
NEW_TOKENS = 8
AUTOCASTS = ("bfloat16", "float16")
# shapes of the tensors of operators: from torch's table, larger, or random
DEFAULT, LARGE, RANDOM = SHAPES = ("default", "large", "random")


_OF_MODULES = ("models", "modules")
_OF_OPERATORS = ("models", "operators")


@titled("operators, with --model opinfo:NAME")
@dataclass(frozen=True, slots=True)
class OperatorOptions:
    shapes: str = option(
        DEFAULT,
        "tensor shapes (default: as in torch's samples; large: about a million elements; random: drawn with --seed)",
        choices=SHAPES,
        only=_OF_OPERATORS,
    )
    shapes_from: Path | None = option(
        None,
        "trace whose calls provide the shapes, dtypes and scalars for the selected operators",
        parse=Path,
        metavar="TRACE",
        only=_OF_OPERATORS,
    )
    per_dtype: int = option(
        2,
        "number of sample inputs to run per operator and dtype, the most different first; 0 for all "
        "(default: %(default)s)",
        parse=not_negative,
        only=_OF_OPERATORS,
    )
    uncovered: Path | None = option(
        None,
        "JSON file to write, with the sample inputs that failed, and the registered operators that have none",
        parse=Path,
        only=_OF_OPERATORS,
    )
    import_: tuple[str, ...] = option(
        (),
        "module to import first because it registers operators; can be repeated",
        word="import",
        repeated=True,
        metavar="MODULE",
        only=_OF_OPERATORS,
    )


@titled("model")
@dataclass(frozen=True, slots=True)
class ModelOptions:
    run: str = option(
        "predict",
        "workload of a step: predict; loss (the forward pass of training); train (with backward pass and "
        "optimizer); generate (a text, token by token) (default: %(default)s)",
        choices=RUNS,
        only=_OF_MODULES,
        common=True,
    )
    batch_size: int | None = option(
        None, "batch size of the inputs (default: the model's own)", parse=positive, only=_OF_MODULES, common=True
    )
    input_size: tuple[int, int] | None = option(
        None,
        "size of input images in pixels, such as 800x1333 (default: the model's own)",
        parse=image_size,
        metavar="HxW",
        only=_OF_MODULES,
        common=True,
    )
    sequence_length: int | None = option(
        None,
        "number of tokens of the input text (default: the model's own)",
        parse=positive,
        only=_OF_MODULES,
        common=True,
    )
    new_tokens: int | None = option(
        None,
        f"number of tokens that --run generate adds to each text (default: {NEW_TOKENS})",
        parse=positive,
        only=_OF_MODULES,
    )
    autocast: str | None = option(
        None,
        "dtype of torch.autocast to run the model under (default: no autocast)",
        choices=AUTOCASTS,
        only=_OF_MODULES,
        common=True,
    )
    device: str = option(
        "cpu", "device to run the model on, such as cuda:0 (default: %(default)s)", only=("models",), common=True
    )
    checkpoint: Path | None = option(
        None, "file of weights to load (default: random weights)", parse=Path, only=_OF_MODULES, common=True
    )
    cfg_options: tuple[str, ...] = option(
        (),
        "settings that override an OpenMMLab or transformers config",
        several=True,
        metavar="KEY=VALUE",
        only=_OF_MODULES,
        common=True,
    )
    operators: OperatorOptions = field(default_factory=OperatorOptions)


@dataclass(frozen=True, slots=True)
class ModelProgram:
    """A model with its inputs and the function that runs one step of it.

    name : short name, suitable for a file name
    model : module to which module paths in the trace are relative
    inputs : function that returns the inputs of one step, with the same values each time; a step may change them
    details : fields for the trace's header
    steps : number of steps, without warm-up; None to take it from the options
    finish : function called after all steps, which returns lines to print
    """

    name: str
    model: nn.Module
    inputs: Callable[[], Any]
    step: Callable[[Any], Any]
    details: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    finish: Callable[[], Iterable[str]] = tuple


def under_autocast(program: ModelProgram, dtype: str | None) -> ModelProgram:
    """Return a program that runs its model under `torch.autocast`, but not its backward pass and optimizer.

    dtype : `bfloat16` or `float16`; None to return the program unchanged
    """
    if dtype is None:
        return program

    def step(inputs: Any) -> Any:
        with _autocast_in_forward(program.model, dtype):
            return program.step(inputs)

    return replace(program, step=step, details={**program.details, "autocast": dtype})


@contextmanager
def _autocast_in_forward(model: nn.Module, dtype: str) -> Iterator[None]:
    import torch

    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    contexts: list[torch.autocast] = []

    def enter(*_: Any) -> None:
        context = torch.autocast(device, dtype=getattr(torch, dtype))
        context.__enter__()
        contexts.append(context)

    def leave(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    # always_call, because autocast must end also if the forward raises
    hooks = (model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


OPTIONS_OF_TEXTS = ("sequence_length", "new_tokens")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A kind of names that `--model` accepts, such as configs or classes of a package.

    form : form of the source's model names, for the help text
    matches : function that returns True for a `--model` of this source
    load : function that builds the program, or raises `UserError`
    lacks : options that the source does not support, by their groups in `Option.only`, such as `operators`
    hint : advice in the error message for these options
    runs : supported values of `--run`
    takes : which of the options `sequence_length` and `new_tokens` are supported
    """

    form: str
    matches: Callable[[str], bool]
    load: Callable[[str, ModelOptions], ModelProgram]
    lacks: Sequence[str] = ("operators",)
    hint: str = "name some with --model opinfo:NAME"
    runs: Sequence[str] = RUNS_OF_ALL
    takes: Sequence[str] = ()


model_sources: Registry[ModelSource] = Registry("opgrip.capture.models", "opgrip.model_sources")


def source_of(name: str) -> ModelSource:
    for source in model_sources.values():
        if source.matches(name):
            return source
    forms = "; ".join(source.form for source in model_sources.values())
    raise UserError(f"no model {name!r}", f"name one of: {forms}")


def load_program(name: str, options: ModelOptions) -> ModelProgram:
    """Build the program of the model that the user names with `--model`; raise `UserError` if that is impossible."""
    source = source_of(name)
    if options.run not in source.runs:
        raise UserError(f"--run {options.run} does not apply to {name}", f"choose {listed(source.runs)}")
    for word in OPTIONS_OF_TEXTS:
        if getattr(options, word) is not None and word not in source.takes:
            raise UserError(
                f"{flag_of(word)} does not apply to {name}", "it applies only to models that read or write texts"
            )
    return under_autocast(source.load(name, options), options.autocast)
