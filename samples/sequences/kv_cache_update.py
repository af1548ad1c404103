import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, batch: int, heads: int, size: int, width: int, past: int, length: int = 1) -> Arguments:
    """Return caches with space for `size` tokens, which contain `past` tokens, and keys and values of the next `length`
    tokens.

    batch, heads, width : number of sequences and of heads, and length of a key or value
    """
    caches = []
    for _ in range(2):
        cache = torch.zeros(batch, heads, size, width)
        cache[:, :, :past] = draw.normal(batch, heads, past, width)
        caches.append(cache)
    key, value = draw.normal(batch, heads, length, width), draw.normal(batch, heads, length, width)
    return caches[0], caches[1], key, value, torch.arange(past, past + length)


@sample(
    inputs,
    {
        "Llama 3 8B, generation behind 512 tokens, cache of 2048": (1, 8, 2048, 128, 512),
        "Llama 3 8B, prompt of 512 tokens, cache of 2048": (1, 8, 2048, 128, 0, 512),
        "Llama 2 7B, generation behind 300 tokens, batch of 4, cache of 512": (4, 32, 512, 128, 300),
    },
    tags="AdvancedIndexing InPlace BuiltInDataStructure",
    url="https://github.com/huggingface/transformers/blob/main/src/transformers/cache_utils.py",
)
def kv_cache_update(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Write keys and values into caches at the given positions.

    Parameters
    ----------
    key_cache, value_cache : (B, K, S, D) float, space for S tokens; modified in place
    key, value : (B, K, L, D) float, of L tokens
    positions : (L,) int64, positions in the cache

    Returns key_cache, value_cache : the same tensors
    Source: Transformers, `StaticCache`.
    """
    return key_cache.index_copy_(2, positions, key), value_cache.index_copy_(2, positions, value)
