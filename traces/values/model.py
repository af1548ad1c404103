"""What a value model is, and which one a tensor gets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from functools import lru_cache

import numpy as np
import torch

from opgrip.cli.plugins import Registry
from opgrip.traces.schema.arguments import FormatError, Json, decode, encode
from opgrip.traces.schema.value_model import ValueModel
from opgrip.traces.values.pieces import MOST, pieces, rows_of

ALL, PIECES, ROWS = "all", "pieces", "rows"
"""What a kind of model sees of a large tensor of whose elements none decides for itself: all, pieces, whole rows."""


value_models: Registry[type[ValueModel]] = Registry("opgrip.traces.values", "opgrip.value_models")
"""Kinds of value models by the name that stands in the trace."""


def fit(tensor: torch.Tensor, requested_kinds: Collection[str] = (), exact: bool = True) -> ValueModel | None:
    """The first model that fits a tensor, None for an empty one.

    Parameters
    ----------
    requested_kinds : names of kinds to try that else are not, those with `on_request = True`
    exact : all kinds see all elements; else of a large tensor some see pieces, as their `seen` says
    """
    if tensor.numel() == 0:
        return None
    # whatever a program asks numpy to do where numbers overflow, it is not the program's numbers that do
    with torch.no_grad(), np.errstate(all="ignore"):
        plain = tensor.detach().resolve_conj().resolve_neg()
        parts = {ALL: plain}
        for kind in _kinds(frozenset(requested_kinds), len(value_models.names())):
            seen = ALL if exact or plain.numel() <= MOST else getattr(kind, "seen", ALL)
            if seen not in parts:
                parts[seen] = rows_of(plain) if seen == ROWS and plain.dim() > 1 else pieces(plain)
            model = kind.fit(parts[seen])
            if model is not None:
                return model
    return None


@lru_cache
def _kinds(requested: frozenset[str], known: int) -> tuple[type[ValueModel], ...]:
    """The kinds to try, in their order, of so many that are known by now."""
    kinds = [kind for name, kind in value_models.items() if name in requested or not getattr(kind, "on_request", False)]
    return tuple(sorted(kinds, key=lambda kind: kind.priority))


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


def leading(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """The first elements of a large tensor in row-major order, in whole rows where these fit; a view."""
    for dimension in range(tensor.dim()):
        if tensor.numel() <= most:
            break
        row = tensor.numel() // tensor.shape[dimension]
        tensor = tensor.narrow(dimension, 0, max(1, most // row))
    return tensor


def value_model_to_json(model: ValueModel) -> dict[str, Json]:
    """The fields of a model, with its name under `model`; without those that have their default."""
    name = next(name for name, kind in value_models.items() if kind is type(model))
    values = {field.name: getattr(model, field.name) for field in fields(model)}
    defaults = {field.name: field.default for field in fields(model)}
    return {"model": name} | {
        key: encode(value) for key, value in values.items() if defaults[key] is MISSING or value != defaults[key]
    }


def value_model_from_json(form: Mapping[str, Json]) -> ValueModel:
    """The model of a record that `value_model_to_json` made, now or in an older version.

    Raises
    ------
    FormatError : for a model of unknown kind, or fields that it cannot draw from
    """
    name = str(form.get("model"))[:60]
    kind = value_models.get(name)
    if kind is None:
        raise FormatError(f"a value model of unknown kind {name!r}")
    form_fields = [field for field in fields(kind) if field.name in form or field.default is MISSING]
    missing = [field.name for field in form_fields if field.name not in form]
    if missing:
        raise FormatError(f"a {name} value model without {', '.join(missing)}")
    model = kind(**{field.name: decode(form[field.name]) for field in form_fields})
    try:
        model.check()
    except FormatError:
        raise
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise FormatError(f"a {name} value model that cannot be drawn from ({error})") from error
    return model
