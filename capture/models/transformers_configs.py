"""Configs of transformers: which architecture a name means, and what `--cfg-options` changes of its settings."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from opgrip.capture.models.transformers_small import SMALL, small_settings
from opgrip.cli.command import did_you_mean
from opgrip.cli.plugins import needed
from opgrip.errors import UserError, cause_of

EXTRA = "transformers"
HEADS = (
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
"""Tasks in the order in which a model type's usual head is looked for; a type that has none is the bare model."""


def architectures() -> list[str]:
    """The classes with the usual heads of all model types, by the types' names."""
    return list(dict.fromkeys(name for name in map(usual_class, model_types()) if name is not None))


@cache
def model_types() -> tuple[str, ...]:
    """The model types that transformers has."""
    return tuple(sorted(needed("transformers.models.auto.configuration_auto", EXTRA).CONFIG_MAPPING_NAMES))


def usual_class(model_type: str) -> str | None:
    """The class of a model type with its usual head; None where it has no model of its own."""
    tables = needed("transformers.models.auto.modeling_auto", EXTRA)
    for table in (*(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in HEADS), "MODEL_MAPPING_NAMES"):
        name = getattr(tables, table, {}).get(model_type)
        if name is not None:
            # some types have several bare models
            return str(name if isinstance(name, str) else name[0])
    return None


def find_class(name: str) -> type[Any]:
    """The class of that name, or that with the usual head of the model type of that name.

    Raises
    ------
    UserError : where there is none
    """
    package = needed("transformers", EXTRA)
    found: Any = (
        getattr(package, usual_class(name) or name, None) if name in model_types() else _class_named(package, name)
    )
    if isinstance(found, type) and issubclass(found, package.PreTrainedModel):
        architecture: type[Any] = found
        if getattr(architecture, "config_class", None) is not None:
            return architecture
    names = {*model_types(), *(other for other in dir(package) if "For" in other or other.endswith("Model"))}
    hint = did_you_mean(name, names, "name a class, as BertForMaskedLM, or a model type, as bert", "transformers:{}")
    raise UserError(f"transformers has no model {name!r}", hint)


def _class_named(package: Any, name: str) -> Any:
    # only what the package exports: a name from outside is looked up in no other way
    return getattr(package, name, None) if name in dir(package) else None


def make_config(found: type[Any], cfg_options: Sequence[str], sizes: Mapping[str, Any]) -> Any:
    """The config of a class, with the settings that are asked for.

    Parameters
    ----------
    cfg_options : `key=value` each, dots lead into configs within; or `small`, for few and narrow layers
    sizes : settings that other options say; those that the config does not have are left out

    Raises
    ------
    UserError : for a setting that it does not have, or that does not fit the others
    """
    config_class: Any = found.config_class
    default = _build(config_class, {}, found.__name__)
    settings: dict[str, Any] = {}
    if SMALL in cfg_options:
        settings = small_settings(default)
    for key, value in _parsed(cfg_options):
        _set(settings, default, key, value)
    for key, value in sizes.items():
        for path in _paths_of(default, key):
            _set(settings, default, path, value)
    config = _build(config_class, settings, found.__name__) if settings else default
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # some leave to their checkpoints which word a text begins with
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _build(config_class: Any, settings: Mapping[str, Any], name: str) -> Any:
    try:
        return config_class(**settings)
    except Exception as error:
        raise UserError(f"the config of {name} cannot be built so", cause_of(error, 300)) from error


def _parsed(cfg_options: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for text in cfg_options:
        key, sign, value = text.partition("=")
        if sign and key:
            yield key, _value(value)
        elif text != SMALL:
            raise UserError(f"--cfg-options {text} is no setting", f"write key=value, or {SMALL} for a small model")


def _value(text: str) -> Any:
    """A number, list, or None, as Python writes it; else the text. Nothing is evaluated."""
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _set(settings: dict[str, Any], config: Any, key: str, value: Any) -> None:
    """Enter a setting in what a config is made of."""
    name, dot, rest = key.partition(".")
    if not hasattr(config, name):
        names = [*config.to_dict(), *config.attribute_map]
        raise UserError(f"{type(config).__name__} has no setting {name!r}", did_you_mean(name, names, _listed(names)))
    if not dot:
        settings[name] = value
        return
    inner = getattr(config, name)
    if not hasattr(inner, "to_dict"):
        raise UserError(f"{key}: {name} of {type(config).__name__} has no settings of its own", f"write {name}=...")
    # configs within are made of dictionaries that say which they are
    inner_settings = settings.setdefault(name, {"model_type": inner.model_type})
    _set(inner_settings, inner, rest, value)


def _listed(names: Sequence[str]) -> str:
    return "it has " + ", ".join(sorted(names)[:12]) + ", ..."


def _paths_of(config: Any, key: str) -> Iterator[str]:
    """Where a config or the configs within it have a setting of that name."""
    if getattr(config, key, None) is not None:
        yield key
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            yield from (f"{name}.{path}" for path in _paths_of(inner, key))
