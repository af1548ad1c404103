from math import log2

import torch
from torch import Tensor

from opgrip.samples.sample import Draw, sample


def inputs(draw: Draw, batch: int, length: int, heads: int) -> tuple[Tensor, int]:
    """Sequences that are padded on the left."""
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
    """What to add to attention scores, by head and key: a slope times the key's position.

    That of the query is left out, since it adds the same to all of its scores.

    Parameters
    ----------
    attention_mask : (B, S) int64, one for tokens, zero for padding, which is not counted
    heads : H

    Returns (B * H, 1, S) float32
    Source: Press et al. 2022 (train short, test long), section 3 and its code; shape as in BLOOM of Transformers.
    """
    position = (attention_mask.cumsum(dim=1) - 1) * attention_mask
    slope = torch.tensor(slopes(heads), device=attention_mask.device)
    return (slope[:, None] * position[:, None, :]).reshape(-1, 1, attention_mask.shape[1])


def slopes(heads: int) -> list[float]:
    """Slopes of the heads, a geometric series; where they are no power of two, every other one of a finer one too."""
    power = 2 ** int(log2(heads))
    series = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    if power < heads:
        series += slopes(2 * power)[::2][: heads - power]
    return series
