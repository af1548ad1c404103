"""Models of the package transformers, by class or model type: `transformers:BertForMaskedLM`, `transformers:bert`."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from opgrip.capture.models.factory import train_step
from opgrip.capture.models.program import ModelProgram, load_weights
from opgrip.capture.models.sources import GENERATE, LOSS, NEW_TOKENS, PREDICT, TRANSFORMERS, ModelOptions
from opgrip.cli.command import did_you_mean
from opgrip.cli.plugins import needed
from opgrip.errors import UserError, cause_of
from opgrip.platform.machine import check_device, free_memory

LEARNING_RATE = 1e-5


def load_transformer(text: str, options: ModelOptions) -> ModelProgram:
    package = needed("transformers", EXTRA)
    # otherwise transformers prints its defaults
    package.logging.set_verbosity_error()
    device = check_device(options.device)
    model_class = find_class(text.removeprefix(TRANSFORMERS))
    if options.run == GENERATE and not model_class.can_generate():
        raise UserError(f"{model_class.__name__} cannot generate text", "choose --run predict, loss or train")
    if options.new_tokens is not None and options.run != GENERATE:
        raise UserError("--new-tokens is for --run generate", f"leave it out with --run {options.run}")
    sizes: dict[str, Any] = {}
    if options.input_size is not None:
        height, width = options.input_size
        sizes = {"image_size": height if height == width else [height, width]}
    config = make_config(model_class, options.cfg_options, sizes)
    model = _build(model_class, config)
    if options.checkpoint is not None:
        load_weights(model, options.checkpoint)
    model.to(device)
    inputs = make_inputs(model, options)
    return ModelProgram(
        name=text.removeprefix(TRANSFORMERS),
        model=model,
        inputs=lambda: copy.deepcopy(inputs),
        step=_step(model, options),
        details={
            "source": text,
            "class": model_class.__name__,
            "cfg_options": list(options.cfg_options),
            "packages": {"transformers": package.__version__},
        },
    )


def _build(model_class: type[Any], config: Any) -> nn.Module:
    size, room = weight_bytes(model_class, config), free_memory("cpu")
    if size is not None and room is not None and size > room:
        problem = (
            f"the weights of {model_class.__name__} need {size / 1000000000.0:.1f} GB, but only "
            f"{room / 1000000000.0:.1f} GB of memory are free"
        )
        raise UserError(problem, "make the model smaller, as with --cfg-options num_hidden_layers=2")
    try:
        model: nn.Module = model_class(config)
    except Exception as error:
        raise UserError(f"{model_class.__name__} cannot be built", cause_of(error, 300)) from error
    return model


def weight_bytes(model_class: type[Any], config: Any) -> int | None:
    """Return the size in bytes of a model's weights without allocating them."""
    try:
        with torch.device("meta"):
            model = model_class(copy.deepcopy(config))
    except Exception:
        # some models compute with their weights during construction
        return None
    return sum(int(parameter.numel() * parameter.element_size()) for parameter in model.parameters())


def _step(model: Any, options: ModelOptions) -> Callable[[Any], Any]:
    if options.run == PREDICT:
        model.eval()
        return torch.no_grad()(lambda inputs: model(**inputs))
    if options.run == GENERATE:
        model.eval()
        count = options.new_tokens or NEW_TOKENS
        # suppress the end token, which random weights would choose at random, so that the number of steps is fixed
        settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "num_beams": 1}
        ranges: list[Any] = []

        def begin(*_: Any) -> None:
            ranges.append(torch.profiler.record_function("decode" if ranges else "prefill"))
            ranges[-1].__enter__()

        def generate(inputs: Any) -> Any:
            ranges.clear()
            return model.generate(**inputs, **settings)

        model.register_forward_pre_hook(begin)
        model.register_forward_hook(lambda *_: ranges[-1].__exit__(None, None, None))
        return torch.no_grad()(generate)
    model.train()
    if options.run == LOSS:
        return lambda inputs: loss_of(model(**inputs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return train_step(lambda inputs: loss_of(model(**inputs)), optimizer)


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a model's output; without one, the mean of the first tensor that requires a gradient."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    values = list(output.values()) if hasattr(output, "values") else output
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.float().mean()
    raise UserError("the model returned no tensor that requires a gradient", "choose --run predict")


EXTRA = "transformers"
# tasks in the order in which `usual_class` looks for a class; without any, it takes the class without a head
_TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "MASK_GENERATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
    "PRETRAINING",
)


def architectures() -> list[str]:
    return list(dict.fromkeys(name for name in map(usual_class, model_types()) if name is not None))


@cache
def model_types() -> tuple[str, ...]:
    return tuple(sorted(needed("transformers.models.auto.configuration_auto", EXTRA).CONFIG_MAPPING_NAMES))


def usual_class(model_type: str) -> str | None:
    tables = needed("transformers.models.auto.modeling_auto", EXTRA)
    for table in (*(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in _TASKS), "MODEL_MAPPING_NAMES"):
        name = getattr(tables, table, {}).get(model_type)
        if name is not None:
            # some types have several bare models
            return str(name if isinstance(name, str) else name[0])
    return None


def find_class(name: str) -> type[Any]:
    package = needed("transformers", EXTRA)
    is_known = name in model_types()
    # look up names from outside only among the package's exports
    class_name = (usual_class(name) or name) if is_known else name
    named_class: Any = getattr(package, class_name, None) if is_known or name in dir(package) else None
    if isinstance(named_class, type) and issubclass(named_class, package.PreTrainedModel):
        architecture: type[Any] = named_class
        if getattr(architecture, "config_class", None) is not None:
            return architecture
    names = {*model_types(), *(other for other in dir(package) if "For" in other or other.endswith("Model"))}
    hint = did_you_mean(name, names, "name a class, as BertForMaskedLM, or a model type, as bert", "transformers:{}")
    raise UserError(f"transformers has no model {name!r}", hint)


def make_config(model_class: type[Any], cfg_options: Sequence[str], sizes: Mapping[str, Any]) -> Any:
    """Build the config of a model class.

    cfg_options : texts such as `key=value` or `nested.key=value`; or `small`, for few and narrow layers
    """
    config_class: Any = model_class.config_class
    default = _build_config(config_class, {}, model_class.__name__)
    settings: dict[str, Any] = {}
    if SMALL in cfg_options:
        settings = small_settings(default)
    for key, value in _parsed(cfg_options):
        _set_option(settings, default, key, value)
    for key, value in sizes.items():
        for path in _paths_of(default, key):
            _set_option(settings, default, path, value)
    config = _build_config(config_class, settings, model_class.__name__) if settings else default
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # some leave the start token of a text to their checkpoints
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _build_config(config_class: Any, settings: Mapping[str, Any], name: str) -> Any:
    try:
        return config_class(**settings)
    except Exception as error:
        raise UserError(f"the config of {name} cannot be built with these settings", cause_of(error, 300)) from error


def _parsed(cfg_options: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for text in cfg_options:
        key, sign, value = text.partition("=")
        if sign and key:
            yield key, _value(value)
        elif text != SMALL:
            raise UserError(f"--cfg-options {text} is not a setting", f"write key=value, or {SMALL} for a small model")


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _set_option(settings: dict[str, Any], config: Any, key: str, value: Any) -> None:
    name, dot, rest = key.partition(".")
    if not hasattr(config, name):
        names = [*config.to_dict(), *config.attribute_map]
        otherwise = f"it has {', '.join(sorted(names)[:12])}, ..."
        raise UserError(f"{type(config).__name__} has no setting {name!r}", did_you_mean(name, names, otherwise))
    if not dot:
        settings[name] = value
        return
    inner = getattr(config, name)
    if not hasattr(inner, "to_dict"):
        raise UserError(f"{key}: {name} of {type(config).__name__} has no settings below it", f"write {name}=...")
    # nested configs are created from dictionaries that contain their type
    inner_settings = settings.setdefault(name, {"model_type": inner.model_type})
    _set_option(inner_settings, inner, rest, value)


def _paths_of(config: Any, key: str) -> Iterator[str]:
    if getattr(config, key, None) is not None:
        yield key
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            yield from (f"{name}.{path}" for path in _paths_of(inner, key))


SMALL = "small"  # value of `--cfg-options` for a small config

WIDTH, HEADS, LAYERS, WORDS, EXPERTS = 96, 4, 2, 1024, 4
HEAD = WIDTH // HEADS

_SIZES: Mapping[str, int] = MappingProxyType(
    {
        # widths; 96 is divisible by the number of heads, the 32 groups of a norm, and the six coordinates of a box
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), WIDTH),
        **dict.fromkeys(("projection_dim", "encoder_hidden_size", "decoder_hidden_size", "text_embed_dim"), WIDTH),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 2 * WIDTH),
        **dict.fromkeys(("n_inner", "mlp_dim", "moe_intermediate_size", "ffn_hidden_size"), 2 * WIDTH),
        **dict.fromkeys(("shared_expert_intermediate_size", "feature_projection_hidden_size"), 2 * WIDTH),
        **dict.fromkeys(("coordinate_size", "shape_size"), WIDTH // 6),
        **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "d_kv"), HEAD),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "rotary_dim"), 16),
        # numbers of layers
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), LAYERS),
        **dict.fromkeys(("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers"), LAYERS),
        # numbers of heads
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEADS),
        **dict.fromkeys(("decoder_attention_heads", "decoder_num_attention_heads"), HEADS),
        # numbers of experts, and of active experts
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
        **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "n_group"), 2),
        "topk_group": 1,
        # periods of layers of another kind, such that two layers include one of each
        **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
        **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
        "vocab_size": WORDS,
    }
)
_SPECIAL = ("_token_id", "_token_index")  # suffixes of the names of settings that contain a token id


def small_settings(config: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    values = config.to_dict()
    stages = values.get("depths") or values.get("num_blocks")
    for name, size in _SIZES.items():
        value = values.get(name)
        # stages themselves set the number of layers, and the width of the first determines that of the last
        if type(value) is int and value > size and not (stages and name in ("hidden_size", "num_layers")):
            settings[name] = size
    if isinstance(values.get("depths"), list | tuple):
        settings["depths"] = [1] * len(values["depths"])
    settings |= _heads(config, values) | _words(values)
    for name in getattr(config, "sub_configs", {}):
        inner: Any = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            settings[name] = {"model_type": inner.model_type, **small_settings(inner)}
    return settings


def _heads(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    heads, groups = getattr(config, "num_attention_heads", None), values.get("num_key_value_heads")
    if type(groups) is int and groups > 1:
        settings["num_key_value_heads"] = HEADS if groups == heads else 2
    if type(values.get("expand")) is int and "num_heads" in values:
        # the heads of a state space split its inner width, which is `expand` times the outer one
        settings["num_heads"] = values["expand"] * HEADS
    if isinstance(values.get("attention_types"), list):
        # pairs of kinds of layers and the number of their repetitions
        settings["attention_types"] = [[values["attention_types"][0][0], 1]]
    return settings


def _words(values: Mapping[str, Any]) -> dict[str, int]:
    names = [name for name, value in values.items() if name.endswith(_SPECIAL) and type(value) is int]
    large = sorted(name for name in names if values[name] >= WORDS)
    return {name: WORDS - 1 - place for place, name in enumerate(large)}


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
    return torch.randint(0, max(count, 1), shape)


def _objects(classes: int) -> dict[str, Tensor]:
    # centres and sizes relative to the image
    boxes = torch.cat([torch.rand(OBJECTS, 2) * 0.4 + 0.3, torch.rand(OBJECTS, 2) * 0.4 + 0.1], dim=1)
    return {"class_labels": _classes(classes, OBJECTS), "boxes": boxes}


def _masks_of_objects(model: Any, batch: int, size: tuple[int, int]) -> dict[str, Any]:
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
    model: Any
    config: Any
    parameters: frozenset[str]
    batch: int
    sequence: int
    size: tuple[int, int]


def make_inputs(model: Any, options: ModelOptions) -> dict[str, Any]:
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
    words = next(_settings(config, "vocab_size"), 2)
    texts = torch.randint(0, words, shape)
    values = config.to_dict()
    # ids with a meaning, such as padding or the position of an image
    names = [name for name in values if name.endswith(_SPECIAL)]
    special = {values[name] for name in names if type(values[name]) is int}
    ordinary = next(word for word in range(words - 1, -1, -1) if word not in special or word == 0)
    for word in special:
        texts[texts == word] = ordinary
    return texts


def _input_ids(request: InputRequest) -> Tensor:
    shape = (request.batch, request.sequence)
    if type(request.model).__name__.endswith("ForMultipleChoice"):
        return _texts(request.config.get_text_config(), request.batch, 2, request.sequence)
    return _texts(request.config.get_text_config(), *shape)


def _pixel_values(request: InputRequest) -> Tensor | None:
    if "input_ids" in request.parameters and any(hasattr(request.config, name) for name in PLACES_OF_IMAGES):
        # use texts without images, because only a model's processor knows how many tokens an image's features replace
        return None
    channels = next(_settings(request.config, "num_channels", "in_channels", "in_chans"), 3)
    frames = next(_settings(request.config, "num_frames"), VIDEO_FRAMES)
    video = type(request.model).__name__.endswith("ForVideoClassification")
    return torch.randn(request.batch, *((frames,) if video else ()), channels, *request.size)


def _pixel_values_videos(request: InputRequest) -> Tensor | None:
    if "pixel_values" in request.parameters:
        return None
    frames = next(_settings(request.config, "num_frames", "frames_per_clip"), VIDEO_FRAMES)
    return torch.randn(request.batch, frames, 3, *request.size)


def _input_values(request: InputRequest) -> Tensor:
    bins = next(_settings(request.config, "num_mel_bins"), None)
    frames = next(_settings(request.config, "max_length"), None)
    if bins is not None and frames is not None and request.model.config.model_type == "audio-spectrogram-transformer":
        return torch.randn(request.batch, frames, bins)
    return torch.randn(request.batch, SAMPLES)


def _input_features(request: InputRequest) -> Tensor:
    config = request.config
    bins = next(_settings(config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"), 80)
    positions = next(_settings(config, "max_source_positions"), None)
    if positions is not None and hasattr(config, "num_mel_bins"):
        # the encoder's second convolution halves the number of frames
        return torch.randn(request.batch, bins, 2 * positions)
    return torch.randn(request.batch, FRAMES, bins)


def _bbox(request: InputRequest) -> Tensor:
    most = next(_settings(request.config, "max_2d_position_embeddings"), 1001)
    corners = torch.randint(0, most // 2, (request.batch, request.sequence, 2))
    return torch.cat([corners, corners + torch.randint(1, most // 2 - 1, corners.shape)], dim=-1)


def _bool_masked_pos(request: InputRequest) -> Tensor | None:
    if not type(request.model).__name__.endswith("ForMaskedImageModeling"):
        return None
    patch = next(_settings(request.config, "patch_size"), 16)
    patches = (request.size[0] // patch) * (request.size[1] // patch)
    return torch.rand(request.batch, patches) < 0.4


# functions that generate the value of each `forward` parameter; other parameters keep their default
_MAKERS: dict[str, Callable[[InputRequest], Any]] = {
    "input_ids": _input_ids,
    "attention_mask": lambda request: (
        torch.ones_like(_input_ids(request)) if "input_ids" in request.parameters else None
    ),
    "decoder_input_ids": lambda request: _texts(
        request.config.get_text_config(decoder=True), request.batch, request.sequence
    ),
    "pixel_values": _pixel_values,
    "pixel_values_videos": _pixel_values_videos,
    "input_values": _input_values,
    "input_features": _input_features,
    "bbox": _bbox,
    "input_points": lambda request: torch.rand(request.batch, 1, POINTS, 2) * torch.tensor(request.size[::-1]),
    "bool_masked_pos": _bool_masked_pos,
}
