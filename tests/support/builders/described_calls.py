"""Calls in the form of a trace, built without a trace."""

from __future__ import annotations

from typing import Any

import torch

from opgrip.capture.signatures.signatures import describe_call
from opgrip.replay.inputs.inputs import device_map
from opgrip.traces import values
from opgrip.traces.values import ValueModel

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
