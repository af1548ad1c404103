"""Value models written to a file and read again."""

from __future__ import annotations

import json
from typing import TypeVar

import torch

from opgrip.traces.values import ValueModel, fit, value_model_from_json, value_model_to_json

Model = TypeVar("Model")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def read_again(model: ValueModel) -> ValueModel:
    return value_model_from_json(json.loads(json.dumps(value_model_to_json(model), allow_nan=False)))


def drawn(model: ValueModel, tensor: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Return values for a tensor like this one, drawn from the model after writing and reading it."""
    again = read_again(model)
    # nan is not equal to itself
    assert repr(again) == repr(model)
    values = again.draw(tuple(tensor.shape), tensor.dtype, torch.Generator(tensor.device).manual_seed(seed))
    assert values.shape == tensor.shape
    assert values.dtype == tensor.dtype
    assert values.is_contiguous()
    return values


def fitted(tensor: torch.Tensor, kind: type[Model]) -> Model:
    model = fit(tensor)
    assert type(model) is kind, model
    return model
