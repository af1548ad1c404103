import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, sequences: int, length: int, vocabulary: int) -> Arguments:
    """Return tokens, (sequences, length) int64; token 1 is padding after each sequence.

    vocabulary : number of different tokens
    """
    tokens = draw.integers(sequences, length, low=4, high=vocabulary)
    lengths = draw.integers(sequences, low=length // 2, high=length + 1)
    padded = torch.arange(length) >= lengths[:, None]
    return tokens.masked_fill(padded, 1), 1


@sample(
    inputs,
    {
        "RoBERTa, 8 sequences of 512 tokens": (8, 512, 50265),
        "fconv IWSLT14 de-en, training, 160 sequences of up to 50 tokens": (160, 50, 8848),
    },
    tags="Reduce",
    url="https://github.com/facebookresearch/fairseq/blob/b5a039c292facba9c73f59ff34621ec131d82341/fairseq/utils.py#L256",
)
def make_positions(tensor: Tensor, padding_idx: int) -> Tensor:
    """Return the position of each token in its sequence, without counting padding.

    Parameters
    ----------
    tensor : (N, T) int64, tokens
    padding_idx : padding token

    Returns (N, T) int64, starting at `padding_idx + 1`; `padding_idx` for padding
    Source: fairseq, `utils.make_positions`.
    """
    counted = tensor != padding_idx
    return counted.cumsum(dim=1) * counted + padding_idx
