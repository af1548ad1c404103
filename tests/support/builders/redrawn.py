"""Calls and value models in the form of a trace, built without one, and models written to a file and read again."""

import json
from typing import Any, TypeVar

import torch

from opgrip.capture.signatures.signatures import describe_call
from opgrip.replay.inputs.inputs import device_map
from opgrip.traces import values
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


HERE = device_map("cpu", None)


def described(*args: Any) -> tuple[tuple[Any, ...], dict[int, ValueModel]]:
    """Return a call's arguments as a trace holds them, with `TensorSpec` for tensors; and the value models by
    number.
    """
    models: dict[int, ValueModel] = {}

    def fit(tensor: torch.Tensor) -> int | None:
        model = values.fit(tensor)
        if model is None:
            return None
        models[len(models)] = model
        return len(models) - 1

    return describe_call(args, {}, lambda argument: fit)[0], models
