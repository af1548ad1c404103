import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw, batch: int, heads: int, key_heads: int, width: int, length: int, past: int = 0, base: float = 10000.0
) -> Arguments:
    """Return queries and keys of `length` tokens after `past` tokens, and the cosines and sines of their positions.

    batch, width : number of sequences, and length of a query or key
    heads, key_heads : number of query heads and of key heads
    base : number from which the frequencies are computed: base ** (-2 * i / width) for pair i of the elements
    """
    positions = torch.arange(past, past + length)
    frequencies = base ** (-torch.arange(0, width, 2) / width)
    angles = (positions[:, None] * frequencies).repeat(1, 2).expand(batch, length, width)
    training = past == 0
    query = draw.normal(batch, heads, length, width, grad=training)
    key = draw.normal(batch, key_heads, length, width, grad=training)
    return query, key, angles.cos(), angles.sin()


@sample(
    inputs,
    {
        "Llama 2 7B, generation behind 512 tokens, batch of 8": (8, 32, 32, 128, 1, 512),
        "Llama 2 7B, training, 512 tokens": (1, 32, 32, 128, 512),
        "Llama 3 8B, training, 1024 tokens": (1, 32, 8, 128, 1024, 0, 500000.0),
    },
    tags="Broadcast ViewAttribute BuiltInDataStructure",
    project="Transformers",
    url="https://arxiv.org/abs/2104.09864",
)
def rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions, so that their products depend only on distances.

    Parameters
    ----------
    query : (B, H, L, D) float, D even; element d is rotated together with element d + D / 2
    key : (B, K, L, D) float
    cos, sin : (B, L, D) float, of position times frequency; both halves of D are equal
    unsqueeze_dim : dimension of the heads in `query` and `key`, 2 for (B, L, H, D)

    Returns query, key : of the same shapes
    Source: Su et al. 2021 (RoFormer), section 3.4.2; halves instead of pairs as in Llama of Transformers.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _turn(query, cos, sin), _turn(key, cos, sin)


def _turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin
