"""Models of the package transformers, by class or model type: `transformers:BertForMaskedLM`, `transformers:bert`.

A model is built from its default config. `--cfg-options` changes the config; `small` makes the layers few and narrow.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from opgrip.capture.models.factory import train_step
from opgrip.capture.models.program import (
    GENERATE,
    LOSS,
    NEW_TOKENS,
    PREDICT,
    RUNS,
    ModelOptions,
    ModelProgram,
    ModelSource,
    load_weights,
    model_sources,
)
from opgrip.capture.models.transformers_inputs import make_inputs
from opgrip.cli.command import did_you_mean
from opgrip.cli.plugins import needed
from opgrip.errors import UserError, cause_of
from opgrip.platform.machine import check_device, free_memory

if TYPE_CHECKING:
    import torch
    from torch import nn


PREFIX = "transformers:"
LEARNING_RATE = 1e-5


def load_transformer(text: str, options: ModelOptions) -> ModelProgram:
    """Build the program of `transformers:` and a class or model type, with random weights unless a checkpoint is given.

    Nothing is downloaded.
    """
    package = needed("transformers", EXTRA)
    # otherwise transformers prints its defaults
    package.logging.set_verbosity_error()
    device = check_device(options.device)
    model_class = find_class(text.removeprefix(PREFIX))
    if options.run == GENERATE and not model_class.can_generate():
        raise UserError(f"{model_class.__name__} writes no text", "choose --run predict, loss or train")
    if options.new_tokens is not None and options.run != GENERATE:
        raise UserError("--new-tokens is for --run generate", f"leave it out with --run {options.run}")
    config = make_config(model_class, options.cfg_options, _sizes(options))
    model = _build(model_class, config)
    if options.checkpoint is not None:
        load_weights(model, options.checkpoint)
    model.to(device)
    inputs = make_inputs(model, options)
    return ModelProgram(
        name=text.removeprefix(PREFIX),
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


def _sizes(options: ModelOptions) -> dict[str, Any]:
    if options.input_size is None:
        return {}
    height, width = options.input_size
    return {"image_size": height if height == width else [height, width]}


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
    """Return the size in bytes of a model's weights without allocating them; None if it cannot be determined."""
    import torch

    try:
        with torch.device("meta"):
            model = model_class(copy.deepcopy(config))
    except Exception:
        # some models compute with their weights during construction
        return None
    return sum(int(parameter.numel() * parameter.element_size()) for parameter in model.parameters())


def _step(model: Any, options: ModelOptions) -> Callable[[Any], Any]:
    import torch

    if options.run == PREDICT:
        model.eval()
        return torch.no_grad()(lambda inputs: model(**inputs))
    if options.run == GENERATE:
        model.eval()
        count = options.new_tokens or NEW_TOKENS
        return torch.no_grad()(lambda inputs: _generate(model, inputs, count))
    model.train()
    if options.run == LOSS:
        return lambda inputs: loss_of(model(**inputs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return train_step(lambda inputs: loss_of(model(**inputs)), optimizer)


def _generate(model: Any, inputs: dict[str, Any], count: int) -> Any:
    # suppress the end token, which random weights would choose at random, so that the number of steps is fixed
    return model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, num_beams=1)


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a model's output, or the mean of its first differentiable tensor."""
    import torch
    from torch.utils._pytree import tree_leaves

    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    values = list(output.values()) if hasattr(output, "values") else output
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return value.float().mean()
    raise UserError("the model returned nothing to train on", "choose --run predict")


model_sources.register("transformers")(
    ModelSource(
        form="transformers:BertForMaskedLM or transformers:bert, with random weights",
        matches=lambda text: text.startswith(PREFIX),
        load=load_transformer,
        runs=RUNS,
        takes=("sequence_length", "new_tokens"),
    )
)


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
    """Return, for all model types in transformers, the names of the classes that `usual_class` returns."""
    return list(dict.fromkeys(name for name in map(usual_class, model_types()) if name is not None))


@cache
def model_types() -> tuple[str, ...]:
    return tuple(sorted(needed("transformers.models.auto.configuration_auto", EXTRA).CONFIG_MAPPING_NAMES))


def usual_class(model_type: str) -> str | None:
    """Return the name of the class that a model type has for the first possible task in `_TASKS`, else of its class
    without a head; None if the type has no model.
    """
    tables = needed("transformers.models.auto.modeling_auto", EXTRA)
    for table in (*(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in _TASKS), "MODEL_MAPPING_NAMES"):
        name = getattr(tables, table, {}).get(model_type)
        if name is not None:
            # some types have several bare models
            return str(name if isinstance(name, str) else name[0])
    return None


def find_class(name: str) -> type[Any]:
    """Return the class with this name, or the `usual_class` of a model type."""
    package = needed("transformers", EXTRA)
    named_class: Any = (
        getattr(package, usual_class(name) or name, None) if name in model_types() else _class_named(package, name)
    )
    if isinstance(named_class, type) and issubclass(named_class, package.PreTrainedModel):
        architecture: type[Any] = named_class
        if getattr(architecture, "config_class", None) is not None:
            return architecture
    names = {*model_types(), *(other for other in dir(package) if "For" in other or other.endswith("Model"))}
    hint = did_you_mean(name, names, "name a class, as BertForMaskedLM, or a model type, as bert", "transformers:{}")
    raise UserError(f"transformers has no model {name!r}", hint)


def _class_named(package: Any, name: str) -> Any:
    # look up names from outside only among the package's exports
    return getattr(package, name, None) if name in dir(package) else None


def make_config(model_class: type[Any], cfg_options: Sequence[str], sizes: Mapping[str, Any]) -> Any:
    """Build the config of a model class; raise `UserError` for an unknown setting, or one that contradicts others.

    cfg_options : `key=value` each, with dots for nested configs; or `small`, for few and narrow layers
    sizes : settings derived from other options; a setting that the config lacks is ignored
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
        raise UserError(f"{type(config).__name__} has no setting {name!r}", did_you_mean(name, names, _listed(names)))
    if not dot:
        settings[name] = value
        return
    inner = getattr(config, name)
    if not hasattr(inner, "to_dict"):
        raise UserError(f"{key}: {name} of {type(config).__name__} has no settings below it", f"write {name}=...")
    # nested configs are created from dictionaries that contain their type
    inner_settings = settings.setdefault(name, {"model_type": inner.model_type})
    _set_option(inner_settings, inner, rest, value)


def _listed(names: Sequence[str]) -> str:
    return "it has " + ", ".join(sorted(names)[:12]) + ", ..."


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
    """Return settings that make the model of a config small, as nested dictionaries; no setting is increased."""
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
