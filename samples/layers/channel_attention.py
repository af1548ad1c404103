import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, users: int, width: int, channels: int = 3) -> Arguments:
    """Return random embeddings of `users` users for each channel, as small as when training begins, and random weights.

    width : length of an embedding
    channels : number of channels
    """
    embeddings = [draw.normal(users, width, std=0.005, grad=True) for _ in range(channels)]
    bounds = (3 / width) ** 0.5, (6 / (width + 1)) ** 0.5
    matrix, attention = (
        draw.uniform(rows, width, low=-bound, high=bound, grad=True)
        for rows, bound in zip((width, 1), bounds, strict=True)
    )
    return embeddings, matrix, attention


@sample(
    inputs,
    {
        "MHCN, LastFM, training": (1892, 50),
        "MHCN, training, 20000 users": (20000, 50),
    },
    tags="ForLoop Reduce Broadcast ViewAttribute BuiltInDataStructure",
    url="https://github.com/PaddlePaddle/PaddleRec/blob/fa3e3a8a591d55778edf8d26982467d5be0840ef/models/recall/mhcn/net.py#L224",
)
def channel_attention(channels: list[Tensor], matrix: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
    """Mix the embeddings of all channels into one per user, with weights that sum to 1 per user.

    Parameters
    ----------
    channels : embeddings of the users, each (U, D) float
    matrix : (D, D) float, applied to the embeddings from the right
    attention : (1, D) float; its product with the result scores a channel

    Returns the mixed embeddings, (U, D) float, and the weights, (U, channels) float
    Source: Yu et al. 2021, "Self-Supervised Multi-Channel Hypergraph Convolutional Network" (MHCN).
    """
    logits = [((embedding @ matrix) * attention).sum(dim=1) for embedding in channels]
    weights = torch.stack(logits, dim=1).softmax(dim=1)
    mixed = torch.zeros_like(channels[0])
    for number, embedding in enumerate(channels):
        mixed = mixed + embedding * weights[:, number, None]
    return mixed, weights
