"""Made-up labels for models of transformers, by the kind of their head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

OBJECTS = 4
"""In an image."""
CHARACTERS = 20
"""In what is said in a sound."""
OF_EXAMPLES = (
    "ForImageClassification",
    "ForVideoClassification",
    "ForSequenceClassification",
    "ForAudioClassification",
    "ForNextSentencePrediction",
    "ForImageClassificationWithTeacher",
)
"""Heads that give one class for each example."""


def make_labels(model: Any, parameters: Collection[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a model is to give for such inputs, by the names that its `forward` has for it; empty where it has none."""
    kind = type(model).__name__
    batch = len(next(iter(inputs.values())))
    if {"mask_labels", "class_labels"} <= set(parameters):
        return _masks_of_objects(model, batch, inputs["pixel_values"].shape[-2:])
    if {"start_positions", "end_positions"} <= set(parameters):
        return {name: _classes(inputs["input_ids"].shape[1], batch) for name in ("start_positions", "end_positions")}
    if "return_loss" in parameters and "labels" not in parameters:
        return {"return_loss": True}
    if "labels" not in parameters:
        return {}
    labels = _labels(model, kind, batch, inputs)
    return {} if labels is None else {"labels": labels}


def _labels(model: Any, kind: str, batch: int, inputs: Mapping[str, Any]) -> Any:
    config = model.config
    classes = int(getattr(config, "num_labels", 2) or 2)
    if kind.endswith(OF_EXAMPLES):
        return _classes(classes, batch)
    if kind.endswith("ForMultipleChoice"):
        return _classes(2, batch)
    if kind.endswith("ForTokenClassification"):
        return _classes(classes, *inputs["input_ids"].shape)
    if kind.endswith("ForSemanticSegmentation"):
        return _classes(classes, batch, *inputs["pixel_values"].shape[-2:])
    if kind.endswith(("ForObjectDetection", "ForSegmentation")):
        return [_objects(classes) for _ in range(batch)]
    if kind.endswith("ForCTC"):
        # 0 stands for the gap between characters
        return _classes(config.vocab_size - 1, batch, CHARACTERS) + 1
    for name in ("decoder_input_ids", "input_ids"):
        if name in inputs:
            return inputs[name].clone()
    return None


def _classes(count: int, *shape: int) -> Tensor:
    import torch

    return torch.randint(0, max(count, 1), shape)


def _objects(classes: int) -> dict[str, Tensor]:
    import torch

    # centres and sizes, as parts of the image
    boxes = torch.cat([torch.rand(OBJECTS, 2) * 0.4 + 0.3, torch.rand(OBJECTS, 2) * 0.4 + 0.1], dim=1)
    return {"class_labels": _classes(classes, OBJECTS), "boxes": boxes}


def _masks_of_objects(model: Any, batch: int, size: tuple[int, int]) -> dict[str, Any]:
    import torch

    classes = int(getattr(model.config, "num_labels", 2) or 2)
    return {
        "mask_labels": [(torch.rand(OBJECTS, *size) < 0.5).float() for _ in range(batch)],
        "class_labels": [_classes(classes, OBJECTS) for _ in range(batch)],
    }
