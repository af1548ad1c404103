import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw, batch: int, heads: int, key_heads: int, width: int, queries: int, keys: int | None = None
) -> Arguments:
    """Return queries, keys and values of `batch` sequences, and a causal mask if there are several queries.

    Parameters
    ----------
    heads, key_heads : number of query heads, and of key and value heads
    width : length of a query or key
    queries : number of queries of a sequence
    keys : number of keys of a sequence; None for `queries`, with gradients as in training
    """
    training = keys is None
    keys = queries if keys is None else keys
    query = draw.normal(batch, heads, queries, width, grad=training)
    key = draw.normal(batch, key_heads, keys, width, grad=training)
    value = draw.normal(batch, key_heads, keys, width, grad=training)
    if queries == 1:
        return query, key, value, None
    unseen = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    mask = torch.zeros(queries, keys).masked_fill(unseen, torch.finfo(torch.float32).min)
    return query, key, value, mask.expand(batch, 1, queries, keys)


@sample(
    inputs,
    {
        "TinyLlama 1.1B, generation behind 255 tokens": (1, 32, 4, 64, 1, 256),
        "Llama 3 8B, training, 256 tokens": (1, 32, 8, 128, 256),
        "Llama 3 8B, generation behind 1023 tokens": (1, 32, 8, 128, 1, 1024),
    },
    tags="IfElseBranch Broadcast ViewAttribute BuiltInDataStructure",
    project="Transformers",
    url="https://arxiv.org/abs/2305.13245",
)
def group_query_attention(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, scaling: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention of H query heads to fewer key and value heads, each repeated for a group of query heads.

    Parameters
    ----------
    query : (B, H, Q, D) float, H a multiple of K
    key, value : (B, K, S, D) float
    attention_mask : (B, 1, Q, S) float, added to the scores
    scaling : factor of the scores; None for 1 / sqrt(D)

    Returns
    -------
    output : (B, Q, H, D) float, contiguous
    weights : (B, H, Q, S) float

    Source: Ainslie et al. 2023 (grouped-query attention), section 2.2; repeated as in Llama of Transformers.
    """
    group = query.shape[1] // key.shape[1]
    key, value = _repeat(key, group), _repeat(value, group)
    if scaling is None:
        scaling = query.shape[3] ** -0.5
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=3, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _repeat(states: Tensor, times: int) -> Tensor:
    if times == 1:
        return states
    return states[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
