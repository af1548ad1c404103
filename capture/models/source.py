"""What a model source is, and which one a `--model` goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opgrip.capture.models.program import RUNS_OF_ALL, ModelOptions, Program, under_autocast
from opgrip.cli.command import listed
from opgrip.cli.options import flag_of
from opgrip.cli.plugins import Registry
from opgrip.errors import UserError

OPTIONS_OF_TEXTS = ("sequence_length", "new_tokens")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A way to get a model.

    Attributes
    ----------
    form : how its models are named, for the help
    matches : whether a `--model` is one of its
    load : the program of one; raises `UserError` where there is none such
    lacks : what it has nothing for, of the words of `Option.only`; such options are refused, with `hint`
    runs : what a step of its models can be
    takes : of the options of texts, `sequence_length` and `new_tokens`, those that it has a use for
    """

    form: str
    matches: Callable[[str], bool]
    load: Callable[[str, ModelOptions], Program]
    lacks: Sequence[str] = ("operators",)
    hint: str = "name some with --model opinfo:NAME"
    runs: Sequence[str] = RUNS_OF_ALL
    takes: Sequence[str] = ()


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
    UserError : where no source knows it, its own cannot load it, or has nothing for such options
    """
    source = source_of(name)
    if options.run not in source.runs:
        raise UserError(f"--run {options.run} is not for {name}", f"choose {listed(source.runs)}")
    for word in OPTIONS_OF_TEXTS:
        if getattr(options, word) is not None and word not in source.takes:
            raise UserError(f"{flag_of(word)} is not for {name}", "it is for models that read or write texts")
    return under_autocast(source.load(name, options), options.autocast)
