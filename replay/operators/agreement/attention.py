"""Attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from opgrip.replay.operators.agreement.sizes import (
    Call,
    Sizes,
    dtypes,
    ends_in_a_row,
    is_tensor,
    shape_of,
    shapes,
)


def attention(call: Call) -> Iterator[Sizes]:
    """Queries, keys and values of heads."""
    query, key, value = (shape_of(call[name]) for name in ("query", "key", "value"))
    for name, shape in (("query", query), ("key", key), ("value", value)):
        yield f"dimensions of {name}", len(shape), 4
    yield "batch of key", key[0], query[0]
    yield "head size of key", key[3], query[3]
    yield "value", value[:3], key[:3]
    # several heads of a query may share one of a key
    yield "heads of query modulo those of key", query[1] % key[1] if key[1] else query[1], 0
    yield from shapes(call, (*query[:3], value[3]), "grad_out", "grad_out_", "out")


def attention_for_cpu(call: Call) -> Iterator[Sizes]:
    """Attention in blocks on the CPU, which walks along heads by pointers."""
    yield from attention(call)
    yield "value", shape_of(call["value"]), shape_of(call["key"])
    yield from shapes(call, shape_of(call["query"])[:3], "logsumexp")
    yield from ends_in_a_row(call, "query", "key", "value", "out")


def _last_size(value: Any) -> int:
    # a nested tensor has sizes of the dimensions that are even
    return int(value.size(-1)) if isinstance(value, Tensor) else int(value.shape[-1])


def projected(call: Call) -> Iterator[Sizes]:
    """Queries, keys and values side by side, with a bias."""
    width, heads = _last_size(call["qkv"]), call["num_heads"]
    yield from shapes(call, (width,), "qkv_bias")
    yield from dtypes(call, call["qkv"].dtype, "qkv_bias")
    yield "size modulo heads", width % (3 * heads) if heads > 0 else None, 0


def encoder(call: Call) -> Iterator[Sizes]:
    """Attention by heads with its projections, alone or as a layer of an encoder."""
    embed, heads = call["embed_dim"], call.get("num_heads", call.get("num_head"))
    for name in ("src", "query", "key", "value"):
        if is_tensor(call.get(name)):
            yield f"last size of {name}", _last_size(call[name]), embed
    yield "embed_dim modulo heads", embed % heads if heads and heads > 0 else None, 0
    yield from shapes(call, (3 * embed, embed), "qkv_weight")
    yield from shapes(call, (3 * embed,), "qkv_bias")
    yield from shapes(call, (embed, embed), "proj_weight")
    vectors = ("proj_bias", *(f"norm_{kind}_{n}" for kind in ("weight", "bias") for n in (1, 2)), "ffn_bias_2")
    yield from shapes(call, (embed,), *vectors)
    tensors = [name for name, value in call.items() if is_tensor(value) and name not in ("mask", "src", "query")]
    yield from dtypes(call, call["src" if "src" in call else "query"].dtype, *tensors)
