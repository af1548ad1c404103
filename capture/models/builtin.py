"""Models that ship with opgrip: `builtin:faster_rcnn`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from opgrip.capture.models.factory import load_factory
from opgrip.capture.models.program import ModelOptions, Program
from opgrip.capture.models.source import ModelSource, model_sources
from opgrip.cli.command import did_you_mean
from opgrip.errors import UserError

PREFIX = "builtin:"
PACKAGE = "opgrip.samples.models"


def builtin_models() -> list[str]:
    """Return the names of the built-in models: modules of the package that define a factory of their own name.

    Their sources are read, not imported: the help lists the names, and does not load torch.
    """
    spec = find_spec("opgrip.samples")
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    files = sorted(path for folder in folders for path in Path(folder, "models").glob("*.py"))
    return [path.stem for path in files if f"def {path.stem}(" in path.read_text(encoding="utf-8")]


def load_builtin(text: str, options: ModelOptions) -> Program:
    """The program of a built-in model.

    Raises
    ------
    UserError : where there is none of that name
    """
    name = text.removeprefix(PREFIX)
    names = builtin_models()
    if name not in names:
        hint = did_you_mean(name, names, "there is " + ", ".join(PREFIX + other for other in names), f"{PREFIX}{{}}")
        raise UserError(f"no built-in model {name!r}", hint)
    return load_factory(f"{PACKAGE}.{name}:{name}", options, text)


model_sources.register("builtin")(
    ModelSource(
        form=f"one of {', '.join(PREFIX + name for name in builtin_models())}",
        matches=lambda text: text.startswith(PREFIX),
        load=load_builtin,
    )
)
