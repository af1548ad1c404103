"""Random inputs and labels for models of transformers, derived from the parameters of `forward`, the config and the
head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opgrip.capture.models.program import GENERATE, PREDICT, ModelOptions

if TYPE_CHECKING:
    from torch import Tensor


OBJECTS = 4  # number of objects in an image
CHARACTERS = 20  # number of characters in a transcript
# heads that return one class per example
OF_EXAMPLES = (
    "ForImageClassification",
    "ForVideoClassification",
    "ForSequenceClassification",
    "ForAudioClassification",
    "ForNextSentencePrediction",
    "ForImageClassificationWithTeacher",
)


def make_labels(model: Any, parameters: Collection[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return random labels for inputs, by the parameter of `forward` that takes them."""
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
        # 0 is the blank between characters
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

    # centres and sizes relative to the image
    boxes = torch.cat([torch.rand(OBJECTS, 2) * 0.4 + 0.3, torch.rand(OBJECTS, 2) * 0.4 + 0.1], dim=1)
    return {"class_labels": _classes(classes, OBJECTS), "boxes": boxes}


def _masks_of_objects(model: Any, batch: int, size: tuple[int, int]) -> dict[str, Any]:
    import torch

    classes = int(getattr(model.config, "num_labels", 2) or 2)
    return {
        "mask_labels": [(torch.rand(OBJECTS, *size) < 0.5).float() for _ in range(batch)],
        "class_labels": [_classes(classes, OBJECTS) for _ in range(batch)],
    }


BATCH_SIZE = 1
SEQUENCE_LENGTH = 128
IMAGE_SIZE = 224
SAMPLES = 16000  # number of samples of a sound: one second at the usual rate of speech models
FRAMES = 100  # number of frames of a sound given as features: one second in frames of 10 ms
VIDEO_FRAMES = 8
POINTS = 2
# names of settings with the token that marks an image's position in a text
PLACES_OF_IMAGES = ("image_token_id", "image_token_index")


@dataclass(frozen=True, slots=True)
class InputRequest:
    """Properties of a model and sizes from the options, from which inputs are generated.

    parameters : names of the parameters of `forward`
    batch, sequence : number of examples in a batch, and number of tokens in a text
    size : height and width of images in pixels
    """

    model: Any
    config: Any
    parameters: frozenset[str]
    batch: int
    sequence: int
    size: tuple[int, int]


def make_inputs(model: Any, options: ModelOptions) -> dict[str, Any]:
    """Return the random inputs of one step, by the parameters of `forward`; with labels if the step computes a loss."""
    import torch
    from torch.utils._pytree import tree_map

    request = _request(model, options)
    inputs: dict[str, Any] = {}
    for name, maker in _MAKERS.items():
        if name in request.parameters and (value := maker(request)) is not None:
            inputs[name] = value
    if options.run == GENERATE:
        # `generate` itself begins the output text of an encoder-decoder
        for name in ("decoder_input_ids", "decoder_attention_mask"):
            inputs.pop(name, None)
    elif options.run != PREDICT:
        inputs |= make_labels(model, request.parameters, inputs)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    moved: dict[str, Any] = tree_map(lambda value: value.to(device) if hasattr(value, "to") else value, inputs)
    return moved


def _request(model: Any, options: ModelOptions) -> InputRequest:
    config = model.config
    # limit the text to the model's number of positions
    most = min(_settings(config.get_text_config(), "max_position_embeddings", "n_positions"), default=SEQUENCE_LENGTH)
    return InputRequest(
        model=model,
        config=config,
        parameters=frozenset(inspect.signature(model.forward).parameters),
        batch=options.batch_size or BATCH_SIZE,
        sequence=options.sequence_length or min(SEQUENCE_LENGTH, most),
        size=options.input_size or _image_size(config),
    )


def _settings(config: Any, *names: str) -> Iterator[int]:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield value
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            yield from _settings(inner, *names)


def _image_size(config: Any) -> tuple[int, int]:
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))):
        value = getattr(part, "image_size", None)
        if isinstance(value, int):
            return value, value
        if isinstance(value, list | tuple) and len(value) == 2:
            return value[0], value[1]
        if isinstance(value, Mapping) and {"height", "width"} <= value.keys():
            return value["height"], value["width"]
    return IMAGE_SIZE, IMAGE_SIZE


def _texts(config: Any, *shape: int) -> Tensor:
    import torch

    words = next(_settings(config, "vocab_size"), 2)
    texts = torch.randint(0, words, shape)
    special = _special_tokens(config)
    ordinary = next(word for word in range(words - 1, -1, -1) if word not in special or word == 0)
    for word in special:
        texts[texts == word] = ordinary
    return texts


def _special_tokens(config: Any) -> set[int]:
    values = config.to_dict()
    names = [name for name in values if name.endswith(("_token_id", "_token_index"))]
    return {values[name] for name in names if type(values[name]) is int}


def _input_ids(request: InputRequest) -> Tensor:
    shape = (request.batch, request.sequence)
    if type(request.model).__name__.endswith("ForMultipleChoice"):
        return _texts(request.config.get_text_config(), request.batch, 2, request.sequence)
    return _texts(request.config.get_text_config(), *shape)


def _attention_mask(request: InputRequest) -> Tensor | None:
    import torch

    if "input_ids" not in request.parameters:
        return None
    return torch.ones_like(_input_ids(request))


def _decoder_input_ids(request: InputRequest) -> Tensor:
    return _texts(request.config.get_text_config(decoder=True), request.batch, request.sequence)


def _pixel_values(request: InputRequest) -> Tensor | None:
    import torch

    if "input_ids" in request.parameters and any(hasattr(request.config, name) for name in PLACES_OF_IMAGES):
        # use texts without images, because only a model's processor knows how many tokens an image's features replace
        return None
    channels = next(_settings(request.config, "num_channels", "in_channels", "in_chans"), 3)
    frames = next(_settings(request.config, "num_frames"), VIDEO_FRAMES)
    video = type(request.model).__name__.endswith("ForVideoClassification")
    return torch.randn(request.batch, *((frames,) if video else ()), channels, *request.size)


def _pixel_values_videos(request: InputRequest) -> Tensor | None:
    import torch

    if "pixel_values" in request.parameters:
        return None
    frames = next(_settings(request.config, "num_frames", "frames_per_clip"), VIDEO_FRAMES)
    return torch.randn(request.batch, frames, 3, *request.size)


def _input_values(request: InputRequest) -> Tensor:
    import torch

    bins = next(_settings(request.config, "num_mel_bins"), None)
    frames = next(_settings(request.config, "max_length"), None)
    if bins is not None and frames is not None and request.model.config.model_type == "audio-spectrogram-transformer":
        return torch.randn(request.batch, frames, bins)
    return torch.randn(request.batch, SAMPLES)


def _input_features(request: InputRequest) -> Tensor:
    import torch

    config = request.config
    bins = next(_settings(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"), 80)
    positions = next(_settings(config, "max_source_positions"), None)
    if positions is not None and hasattr(config, "num_mel_bins"):
        # the encoder's second convolution halves the number of frames
        return torch.randn(request.batch, bins, 2 * positions)
    return torch.randn(request.batch, FRAMES, bins)


def _bbox(request: InputRequest) -> Tensor:
    import torch

    most = next(_settings(request.config, "max_2d_position_embeddings"), 1001)
    corners = torch.randint(0, most // 2, (request.batch, request.sequence, 2))
    return torch.cat([corners, corners + torch.randint(1, most // 2 - 1, corners.shape)], dim=-1)


def _input_points(request: InputRequest) -> Tensor:
    import torch

    return torch.rand(request.batch, 1, POINTS, 2) * torch.tensor(request.size[::-1])


def _bool_masked_pos(request: InputRequest) -> Tensor | None:
    import torch

    if not type(request.model).__name__.endswith("ForMaskedImageModeling"):
        return None
    patch = next(_settings(request.config, "patch_size"), 16)
    patches = (request.size[0] // patch) * (request.size[1] // patch)
    return torch.rand(request.batch, patches) < 0.4


# functions that generate the value of each `forward` parameter; other parameters keep their default
_MAKERS: dict[str, Callable[[InputRequest], Any]] = {
    "input_ids": _input_ids,
    "attention_mask": _attention_mask,
    "decoder_input_ids": _decoder_input_ids,
    "pixel_values": _pixel_values,
    "pixel_values_videos": _pixel_values_videos,
    "input_values": _input_values,
    "input_features": _input_features,
    "bbox": _bbox,
    "input_points": _input_points,
    "bool_masked_pos": _bool_masked_pos,
}
