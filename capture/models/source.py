"""What a model source is, and which one a `--model` goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opgrip.capture.program import ModelOptions, Program
from opgrip.traces.errors import UserError
from opgrip.traces.registry import Registry


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A way to get a model.

    Attributes
    ----------
    form : how its models are named, for the help
    matches : whether a `--model` is one of its
    load : the program of one; raises `UserError` where there is none such
    """

    form: str
    matches: Callable[[str], bool]
    load: Callable[[str, ModelOptions], Program]


model_sources: Registry[ModelSource] = Registry("opgrip.capture.models", "opgrip.model_sources")


def load_program(name: str, options: ModelOptions) -> Program:
    """The program that a `--model` names.

    Raises
    ------
    UserError : where no source knows it, or its own cannot load it
    """
    for source in model_sources.values():
        if source.matches(name):
            return source.load(name, options)
    forms = "; ".join(source.form for source in model_sources.values())
    raise UserError(f"no model {name!r}", f"name one of: {forms}")
