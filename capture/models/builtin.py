"""Models that ship with opgrip: `builtin:faster_rcnn`."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from opgrip.capture.models.factory import load_factory
from opgrip.capture.models.source import ModelSource, model_sources
from opgrip.capture.program import ModelOptions, Program
from opgrip.traces.errors import UserError
from opgrip.traces.suggestions import did_you_mean

PREFIX = "builtin:"
PACKAGE = "opgrip.samples.models"


def builtin_models() -> list[str]:
    """Names of the built-in models: modules of the package that hold a factory of their own name."""
    names = [module.name for module in pkgutil.iter_modules(import_module(PACKAGE).__path__)]
    return [name for name in names if hasattr(import_module(f"{PACKAGE}.{name}"), name)]


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
    ModelSource(form="builtin:faster_rcnn", matches=lambda text: text.startswith(PREFIX), load=load_builtin)
)
