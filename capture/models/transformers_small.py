"""Small configs: few and narrow layers of the same architecture, by the names that configs give to sizes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SMALL = "small"
"""What `--cfg-options` says for a small config."""

WIDTH, HEADS, LAYERS, WORDS = 64, 4, 2, 1024

_SIZES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), WIDTH),
        **dict.fromkeys(("projection_dim", "encoder_hidden_size", "decoder_hidden_size"), WIDTH),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), LAYERS),
        **dict.fromkeys(("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers"), LAYERS),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEADS),
        **dict.fromkeys(("decoder_attention_heads", "decoder_num_attention_heads"), HEADS),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 2 * WIDTH),
        **dict.fromkeys(("n_inner", "mlp_dim", "hidden_dim", "moe_intermediate_size"), 2 * WIDTH),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
        "head_dim": WIDTH // HEADS,
        "num_key_value_heads": 2,
        "vocab_size": WORDS,
    }
)


def small_settings(config: Any) -> dict[str, Any]:
    """What makes a config small: settings by name, those of configs within as dictionaries.

    Parameters
    ----------
    config : with the sizes that its architecture has by default; none is made larger
    """
    settings: dict[str, Any] = {}
    values = config.to_dict()
    for name, size in _SIZES.items():
        value = values.get(name)
        if type(value) is int and value > size:
            settings[name] = size
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            settings[name] = {"model_type": inner.model_type, **small_settings(inner)}
    return settings
