"""Sources of models: the options of a model, the names that `--model` accepts, and how they are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.cli.command import listed, not_negative, positive
from opgrip.cli.option_types import image_size
from opgrip.cli.options import flag_of, option, titled
from opgrip.cli.plugins import Registry
from opgrip.errors import UserError

if TYPE_CHECKING:
    from opgrip.capture.models.program import ModelProgram


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
        "also write a JSON file that lists failed sample inputs, and registered operators without sample inputs",
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


OPTIONS_OF_TEXTS = ("sequence_length", "new_tokens")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A form of names that `--model` accepts, such as a config file or a class of a package.

    form : how such names are written, for the help text
    lacks : groups of options (see `Option.only`) that the source does not support
    hint : advice in the error message for these options
    """

    form: str
    matches: Callable[[str], bool]
    load: Callable[[str, ModelOptions], ModelProgram]
    lacks: Sequence[str] = ("operators",)
    hint: str = "name some with --model opinfo:NAME"
    runs: Sequence[str] = RUNS_OF_ALL
    takes: Sequence[str] = ()


model_sources: Registry[ModelSource] = Registry(None, "opgrip.model_sources")


def source_of(name: str) -> ModelSource:
    for source in model_sources.values():
        if source.matches(name):
            return source
    forms = "; ".join(source.form for source in model_sources.values())
    raise UserError(f"no model {name!r}", f"name {forms}")


def load_program(name: str, options: ModelOptions) -> ModelProgram:
    from opgrip.capture.models.program import under_autocast

    source = source_of(name)
    if options.run not in source.runs:
        raise UserError(f"--run {options.run} does not apply to {name}", f"choose {listed(source.runs)}")
    for word in OPTIONS_OF_TEXTS:
        if getattr(options, word) is not None and word not in source.takes:
            raise UserError(
                f"{flag_of(word)} does not apply to {name}", "it applies only to models that read or write texts"
            )
    return under_autocast(source.load(name, options), options.autocast)


PREFIX = "builtin:"


def builtin_models() -> list[str]:
    # read and not imported, because the help lists the names and must not load torch
    spec = find_spec("opgrip.samples")
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    files = sorted(path for folder in folders for path in Path(folder, "models").glob("*.py"))
    return [path.stem for path in files if f"def {path.stem}(" in path.read_text(encoding="utf-8")]


def is_exported(text: str) -> bool:
    return text.endswith(".pt2") or Path(text).is_dir()


def _load(module: str, name: str) -> Callable[[str, ModelOptions], ModelProgram]:
    def load(text: str, options: ModelOptions) -> ModelProgram:
        return getattr(import_module(f"opgrip.capture.models.{module}"), name)(text, options)  # type: ignore[no-any-return]

    return load


FACTORY = re.compile(r"(?P<where>.+?):(?P<name>[A-Za-z_][\w.]*)")
# prefixes of the names of operators, and of classes of transformers
OPERATORS, TRANSFORMERS = "opinfo:", "transformers:"
# by name, and in the order in which they are asked
SOURCES = {
    "builtin": ModelSource(
        form=f"one of {', '.join(PREFIX + name for name in builtin_models())}",
        matches=lambda text: text.startswith(PREFIX),
        load=_load("factory", "load_builtin"),
    ),
    "exported_graphs": ModelSource(
        form="FILE.pt2 of torch.export or folder of a GraphNet sample, both of which run code from the file",
        matches=is_exported,
        load=_load("exported_graphs", "load_exported"),
    ),
    "factory": ModelSource(
        form="package.module:factory or path/to/file.py:factory",
        matches=lambda text: FACTORY.fullmatch(text) is not None and not text.startswith((OPERATORS, TRANSFORMERS)),
        load=_load("factory", "load_factory"),
        takes=("sequence_length",),
    ),
    "openmmlab": ModelSource(
        form="an OpenMMLab config (path, or name of a config in mmdet or mmseg)",
        matches=lambda text: ":" not in text,
        load=_load("openmmlab", "load_config_model"),
    ),
    "opinfo": ModelSource(
        form="opinfo:all, opinfo:unary or opinfo:add for single operators of torch",
        matches=lambda text: text.startswith(OPERATORS),
        load=_load("operators.operators_program", "load_operators"),
        lacks=("modules",),
        hint="leave it out with --model opinfo:NAME",
    ),
    "transformers": ModelSource(
        form="transformers:BertForMaskedLM or transformers:bert, with random weights",
        matches=lambda text: text.startswith(TRANSFORMERS),
        load=_load("transformers", "load_transformer"),
        runs=RUNS,
        takes=("sequence_length", "new_tokens"),
    ),
}
for name, source in SOURCES.items():
    model_sources.register(name)(source)
