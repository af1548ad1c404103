from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, pairs: int, width: int) -> Arguments:
    """Return correlated features of images and texts, (pairs, width) float, and CLIP's initial scale."""
    images = draw.normal(pairs, width)
    texts = images + 2 * draw.normal(pairs, width)
    return images.requires_grad_(), texts.requires_grad_(), torch.tensor(log(1 / 0.07), requires_grad=True)


@sample(
    inputs,
    {
        "CLIP ViT-B/32, training, 64 pairs": (64, 512),
        "CLIP ViT-L/14, training, 1024 pairs": (1024, 768),
    },
    tags="ViewAttribute Broadcast Reduce",
    project="Transformers",
    url="https://arxiv.org/abs/2103.00020",
    # for a loss of a few units from scores up to a hundred
    atol=1e-4,
)
def contrastive_loss(images: Tensor, texts: Tensor, logit_scale: Tensor) -> Tensor:
    """Return the mean of two cross entropies: the text of each image, and the image of each text.

    Parameters
    ----------
    images, texts : (N, D) float, features; rows with the same index are a pair
    logit_scale : () float, logarithm of the factor of cosine similarities

    Returns () float
    Source: Radford et al. 2021, "CLIP", figure 3, as in Transformers.
    """
    images = images / images.norm(dim=-1, keepdim=True)
    texts = texts / texts.norm(dim=-1, keepdim=True)
    similarity = texts @ images.t() * logit_scale.exp()
    pairs = torch.arange(len(similarity), device=similarity.device)
    return (F.cross_entropy(similarity, pairs) + F.cross_entropy(similarity.t(), pairs)) / 2
