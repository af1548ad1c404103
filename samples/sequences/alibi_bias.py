from math import log2

import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, batch: int, length: int, heads: int) -> Arguments:
    """Return the mask of sequences that are padded on the left, (batch, length) int64.

    heads : number of attention heads, passed to `alibi_bias`
    """
    padding = draw.integers(batch, high=length // 4)
    return (torch.arange(length) >= padding[:, None]).long(), heads


@sample(
    inputs,
    {
        "BLOOM 560M, 8 sequences of 512 tokens": (8, 512, 16),
        "BLOOM 176B, 4 sequences of 2048 tokens": (4, 2048, 112),
    },
    tags="ForLoop IfElseBranch Reduce Broadcast ViewAttribute",
    project="Transformers",
    url="https://arxiv.org/abs/2108.12409",
)
def alibi_bias(attention_mask: Tensor, heads: int) -> Tensor:
    """Return the bias of attention scores, by head and key: a slope times the position of the key.

    The position of the query is left out, since it adds the same to all scores of that query.

    Parameters
    ----------
    attention_mask : (B, S) int64, 1 for tokens, 0 for padding, which is not counted
    heads : H

    Returns (B * H, 1, S) float32
    Source: Press et al. 2022 (train short, test long), section 3 and its code; shape as in BLOOM of Transformers.
    """
    position = (attention_mask.cumsum(dim=1) - 1) * attention_mask
    slope = torch.tensor(slopes(heads), device=attention_mask.device)
    return (slope[:, None] * position[:, None, :]).reshape(-1, 1, attention_mask.shape[1])


def slopes(heads: int) -> list[float]:
    """Return the slopes of the heads, a geometric series.

    If their number is not a power of two, every other slope of the next finer series is added.
    """
    power = 2 ** int(log2(heads))
    series = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    if power < heads:
        series += slopes(2 * power)[::2][: heads - power]
    return series
