from math import log

import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw, queries: int, keys: int, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> Arguments:
    """Return the distances between all queries and keys; the queries are the last of the sequence's tokens.

    queries, keys : number of queries and keys
    Other parameters are passed to `relative_position_bucket`.
    """
    relative = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    return relative, bidirectional, num_buckets, max_distance


@sample(
    inputs,
    {
        "T5-small, decoder, behind 511 tokens": (1, 512, False),
        "T5-small, encoder, 512 tokens": (512, 512, True),
        "T5-small, decoder, training, 512 tokens": (512, 512, False),
    },
    tags="IfElseBranch",
    project="Transformers",
    url="https://arxiv.org/abs/1910.10683",
)
def relative_position_bucket(
    relative_position: Tensor, bidirectional: bool = True, num_buckets: int = 32, max_distance: int = 128
) -> Tensor:
    """Return the bucket of each distance: one per short distance, then buckets of increasing width.

    Parameters
    ----------
    relative_position : (Q, S) int64, position of the key minus that of the query, in tokens
    bidirectional : True to use half of the buckets for keys after the query; False to put these into bucket 0
    num_buckets : number of buckets
    max_distance : distance from which all are in the last bucket

    Returns (Q, S) int64
    Source: Raffel et al. 2020 (T5), section 2.1; widths as in Mesh TensorFlow and Transformers.
    """
    if bidirectional:
        num_buckets //= 2
        first = (relative_position > 0) * num_buckets
        distance = relative_position.abs()
    else:
        first = torch.zeros_like(relative_position)
        distance = -relative_position.clamp(max=0)
    exact = num_buckets // 2
    growth = (distance / exact).log() / log(max_distance / exact)
    wide = (exact + growth * (num_buckets - exact)).clamp(max=num_buckets - 1)
    return first + torch.where(distance < exact, distance, wide.long())
