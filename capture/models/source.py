"""What a model source is, and which one a `--model` goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    lacks : what it has nothing for, of the words of `Option.only`; such options are refused, with `hint`
    """

    form: str
    matches: Callable[[str], bool]
    load: Callable[[str, ModelOptions], Program]
    lacks: Sequence[str] = ("operators",)
    hint: str = "name some with --model opinfo:NAME"


model_sources: Registry[ModelSource] = Registry("opgrip.capture.models", "opgrip.model_sources")


def source_of(name: str) -> ModelSource:
    """The source that a `--model` goes to; `UserError` where none knows it."""
    for source in model_sources.values():
        if source.matches(name):
            return source
    forms = "; ".join(source.form for source in model_sources.values())
    raise UserError(f"no model {name!r}", f"name one of: {forms}")


def load_program(name: str, options: ModelOptions) -> Program:
    """The program that a `--model` names.

    Raises
    ------
    UserError : where no source knows it, or its own cannot load it
    """
    return source_of(name).load(name, options)
