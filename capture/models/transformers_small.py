"""Small configs: few and narrow layers of the same architecture, by the names that configs give to sizes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SMALL = "small"
"""What `--cfg-options` says for a small config."""

WIDTH, HEADS, LAYERS, WORDS, EXPERTS = 96, 4, 2, 1024, 4
HEAD = WIDTH // HEADS

_SIZES: Mapping[str, int] = MappingProxyType(
    {
        # widths; 96 is whole in heads, in the 32 groups of a norm, and in the six coordinates of a box
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
        # heads
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEADS),
        **dict.fromkeys(("decoder_attention_heads", "decoder_num_attention_heads"), HEADS),
        # experts, and which of them are asked
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
        **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "n_group"), 2),
        "topk_group": 1,
        # periods of layers of another kind, so that two layers have one of each
        **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
        **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
        "vocab_size": WORDS,
    }
)
_SPECIAL = ("_token_id", "_token_index")
"""How the names of settings end that are a word of the vocabulary."""


def small_settings(config: Any) -> dict[str, Any]:
    """What makes a config small: settings by name, those of configs within as dictionaries.

    Parameters
    ----------
    config : with the sizes that its architecture has by default; none is made larger
    """
    settings: dict[str, Any] = {}
    values = config.to_dict()
    stages = values.get("depths") or values.get("num_blocks")
    for name, size in _SIZES.items():
        value = values.get(name)
        # where there are stages, they say how many layers there are, and the first how wide the last is
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
    """Numbers of heads that have to fit others."""
    settings: dict[str, Any] = {}
    heads, groups = getattr(config, "num_attention_heads", None), values.get("num_key_value_heads")
    if type(groups) is int and groups > 1:
        settings["num_key_value_heads"] = HEADS if groups == heads else 2
    if type(values.get("expand")) is int and "num_heads" in values:
        # a state space has heads of its inner width
        settings["num_heads"] = values["expand"] * HEADS
    if isinstance(values.get("attention_types"), list):
        # for each of its kinds of layers, how often it comes
        settings["attention_types"] = [[values["attention_types"][0][0], 1]]
    return settings


def _words(values: Mapping[str, Any]) -> dict[str, int]:
    """Words with a meaning, which a small vocabulary has at its end."""
    names = [name for name, value in values.items() if name.endswith(_SPECIAL) and type(value) is int]
    large = sorted(name for name in names if values[name] >= WORDS)
    return {name: WORDS - 1 - place for place, name in enumerate(large)}
