"""What a value model is, and which one a tensor gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Protocol

import torch

from opgrip.traces.arguments import FormatError, Json, decode, encode
from opgrip.traces.registry import Registry


class Drawable(Protocol):
    """What values can be drawn from."""

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """New values on the generator's device, contiguous but where dimensions are expanded."""


class ValueModel(Drawable, Protocol):
    """A frozen dataclass whose fields are plain values, as JSON and `encode` know them.

    Attributes
    ----------
    priority : models are tried in rising order; the first whose `fit` gives one is kept
    """

    priority: ClassVar[int]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def fit(cls, tensor: torch.Tensor) -> ValueModel | None:
        """The model of this tensor's values; None where this kind of model is not for them.

        Draws no random numbers and leaves the tensor as it is.
        """

    def check(self) -> None:
        """Raise `FormatError` where the fields, which may come from a stranger's file, cannot be drawn from."""


value_models: Registry[type[ValueModel]] = Registry("opgrip.traces.values", "opgrip.value_models")
"""Kinds of value models by the name that stands in the trace."""


def fit(tensor: torch.Tensor) -> ValueModel | None:
    """The first model that fits a tensor, None for an empty one."""
    if tensor.numel() == 0:
        return None
    with torch.no_grad():
        for kind in sorted(value_models.values(), key=lambda kind: kind.priority):
            model = kind.fit(tensor.detach())
            if model is not None:
                return model
    return None


def sample(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Some elements of a large tensor, evenly from all of it; a view that copies nothing.

    Parameters
    ----------
    most : elements that a tensor may have to be given whole
    """
    while tensor.numel() > most:
        longest = max(range(tensor.dim()), key=lambda dimension: tensor.shape[dimension])
        if tensor.shape[longest] == 1:
            break
        # by threes: every second element of interleaved pairs would be one of the two alone
        steps = [slice(None)] * tensor.dim()
        steps[longest] = slice(None, None, 3)
        tensor = tensor[tuple(steps)]
    return tensor


def value_model_to_json(model: ValueModel) -> dict[str, Json]:
    """The fields of a model, with its name under `model`."""
    name = next(name for name, kind in value_models.items() if kind is type(model))
    return {"model": name} | {field.name: encode(getattr(model, field.name)) for field in fields(model)}


def value_model_from_json(form: Mapping[str, Json]) -> ValueModel:
    """The model of a record that `value_model_to_json` made.

    Raises
    ------
    FormatError : for a model of unknown kind, or fields that it cannot draw from
    """
    kind = value_models.get(str(form["model"]))
    if kind is None:
        raise FormatError(f"a value model of unknown kind {str(form['model'])[:60]!r}")
    model = kind(**{field.name: decode(form[field.name]) for field in fields(kind)})
    try:
        model.check()
    except FormatError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"a {form['model']} value model that cannot be drawn from ({error})") from error
    return model
