import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, batch: int, length: int, width: int) -> Arguments:
    """Return states of sequences, (batch, length, width) float, most of them padded at the end."""
    lengths = draw.integers(batch, low=length // 4, high=length + 1)
    return draw.normal(batch, length, width, grad=True), torch.arange(length) < lengths[:, None]


@sample(
    inputs,
    {
        "BERT base, training, 8 sequences of up to 128 tokens": (8, 128, 768),
        "BERT large, training, 16 sequences of up to 512 tokens": (16, 512, 1024),
    },
    tags="InputAware DataDependentShape AdvancedIndexing Reduce ViewAttribute BuiltInDataStructure",
    project="FlashAttention",
    url="https://arxiv.org/abs/2205.14135",
)
def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Remove the padding of states, and return the indices that restore it and the start of each sequence.

    Parameters
    ----------
    hidden_states : (B, S, ...) float
    attention_mask : (B, S) bool or int, not zero for tokens

    Returns
    -------
    states : (T, ...) float, of T tokens
    places : (T,) int64, positions of the tokens among all B * S
    offsets : (B + 1,) int32, start of each sequence, and T
    longest : length of the longest sequence

    Source: FlashAttention (Dao et al. 2022), `bert_padding.unpad_input`.
    """
    lengths = attention_mask.bool().sum(dim=1, dtype=torch.int32)
    places = attention_mask.flatten().nonzero().flatten()
    offsets = functional.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[places], places, offsets, int(lengths.max())
