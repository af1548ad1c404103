import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, sequences: int, longest: int, heads: int, width: int, block_size: int = 16) -> Arguments:
    """Return caches in which the blocks of all sequences are mixed, the block tables, and the lengths of the sequences.

    sequences : number of sequences
    longest : largest length of a sequence in tokens
    heads, width : number of heads, and length of a key or value
    block_size : number of tokens of a block
    """
    per_sequence = -(-longest // block_size)
    blocks = sequences * per_sequence
    caches = draw.normal(2, blocks, block_size, heads, width)
    table = draw.permutation(blocks).reshape(sequences, per_sequence)
    return caches[0], caches[1], table, draw.integers(sequences, low=longest // 4, high=longest + 1)


@sample(
    inputs,
    {
        "Llama 3 8B, 4 sequences of up to 128 tokens": (4, 128, 8, 128),
        "Llama 3 8B, 8 sequences of up to 512 tokens": (8, 512, 8, 128),
        "OPT-13B, 4 sequences of up to 200 tokens": (4, 200, 40, 128),
    },
    tags="ForLoop InputAware DataDependentShape AdvancedIndexing Reduce ViewAttribute BuiltInDataStructure",
    project="vLLM",
    url="https://arxiv.org/abs/2309.06180",
)
def paged_kv_gather(
    key_cache: Tensor, value_cache: Tensor, block_table: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the keys and values of several sequences from their blocks, sequence by sequence.

    Parameters
    ----------
    key_cache, value_cache : (P, S, K, D) float, P blocks of S tokens each, K heads
    block_table : (B, M) int64, the blocks of each sequence in order; entries beyond its length are ignored
    lengths : (B,) int64, tokens of each sequence, up to M * S

    Returns
    -------
    keys, values : (T, K, D) float, T is the sum of the lengths
    offsets : (B + 1,) int32, start of each sequence, and T

    Source: Kwon et al. 2023 (PagedAttention), section 4.1; the result fits attention over unpadded sequences.
    """
    block_size = key_cache.shape[1]
    keys, values = [], []
    for blocks, length in zip(block_table, lengths.tolist(), strict=True):
        used = blocks[: -(-length // block_size)]
        keys.append(key_cache[used].flatten(0, 1)[:length])
        values.append(value_cache[used].flatten(0, 1)[:length])
    offsets = functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return torch.cat(keys), torch.cat(values), offsets
