"""Cases of the samples that ship."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from opgrip.cli.suggestions import did_you_mean
from opgrip.errors import UserError
from opgrip.replay.cases.cases import Case, matches
from opgrip.replay.cases.functions import FunctionOperator, Held, described_case
from opgrip.replay.operators.lookup import Operator
from opgrip.replay.operators.memory import tensors_in
from opgrip.samples import Sample, Tag, samples, tag_of

SHIPPED = "samples"
"""Stands for all of them."""


@dataclass(frozen=True, slots=True)
class ConfigurationTensor:
    """Draws the values of one of the tensors that a sample's configuration makes, which are not kept.

    Attributes
    ----------
    place : among the tensors in the arguments
    """

    name: str
    configuration: str
    place: int

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """The values, on the generator's device."""
        return Held(_tensors(self.name, self.configuration)[self.place]).draw(shape, dtype, generator)


def find_samples(name: str = "", patterns: Sequence[str] = (), tags: Sequence[str] = ()) -> list[Sample]:
    """The sample that ships under a name, or all, as far as they have one of some names and all of some tags.

    Raises
    ------
    UserError : where a name or tag is not known
    """
    requested_tags = _tags(tags)
    return [
        sample for sample in samples_named(name) if matches(sample.name, patterns) and requested_tags <= sample.tags
    ]


def samples_named(name: str) -> list[Sample]:
    """The sample that ships under a name; all of them for an empty one.

    Raises
    ------
    UserError : where there is none of the name
    """
    if not name:
        return list(samples().values())
    if name not in samples():
        raise UserError(f"there is no sample {name!r}", did_you_mean(name, samples(), "opgrip samples list shows all"))
    return [samples()[name]]


def _tags(words: Sequence[str]) -> set[Tag]:
    return set(map(_tag, words))


def _tag(word: str) -> Tag:
    try:
        return tag_of(word)
    except ValueError as error:
        names = [tag.value for tag in Tag]
        raise UserError(str(error), did_you_mean(word, names, f"there are {', '.join(names)}")) from error


def shipped_case(sample: Sample, configuration: str, number: int = 0) -> Case:
    """A case of one of a sample's configurations."""
    arguments = sample.arguments(configuration)
    drawables = {
        place: ConfigurationTensor(sample.name, configuration, place) for place in range(len(tensors_in(arguments)))
    }
    # a function that writes nowhere is not run to see that it does not
    may_write = Tag.IN_PLACE in sample.tags
    function = sample.function
    operator = FunctionOperator(function, (arguments, {})) if may_write else Operator(function, mutates=False)
    return described_case(operator, (arguments, {}), drawables, sample.name, number)


@lru_cache(maxsize=1)
def _tensors(name: str, configuration: str) -> list[Tensor]:
    arguments: Any = samples()[name].arguments(configuration)
    return [tensor.detach() for tensor in tensors_in(arguments)]
