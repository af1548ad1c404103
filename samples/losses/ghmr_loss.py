import torch
from torch import Tensor

from opgrip.samples.losses.targets import anchor_deltas
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample

BINS = 10


def inputs(draw: Draw, anchors: int, positives: int) -> Arguments:
    counts = draw.uniform(BINS, low=1.0, high=float(4 * positives))
    return *anchor_deltas(draw, anchors, positives), counts, 0.7


@sample(
    inputs,
    {
        "RetinaNet R50-FPN GHM, 800x1333, training, anchors of stride 32, 2 images": (18900, 13),
        "RetinaNet R50-FPN GHM, 800x1333, training, anchors of stride 16, 2 images": (75600, 159),
        "RetinaNet R50-FPN GHM, 800x1333, training, anchors of stride 8, 2 images": (302400, 34),
    },
    tags="ForLoop IfElseBranch InputAware AdvancedIndexing InPlace Reduce ViewAttribute",
    url="https://github.com/open-mmlab/mmdetection/blob/2294badd86b0bc83e49692187a4639b69f2ec4b8/mmdet/models/losses/ghm_loss.py#L122",
)
def ghmr_loss(
    predicted: Tensor,
    target: Tensor,
    label_weight: Tensor,
    counts: Tensor | None = None,
    momentum: float = 0.0,
    mu: float = 0.02,
    bins: int = 10,
    reduction: str = "mean",
) -> Tensor:
    """Return smooth L1 losses, weighted by the inverse density of their gradient lengths.

    Parameters
    ----------
    predicted, target : (N, D) float
    label_weight : (N, D) float, 0 for ignored elements
    counts : (bins,) float, moving averages of the number of gradients per bin, modified in place; None without momentum
    momentum : share of the old averages that is kept
    mu : distance of the smooth loss from its asymptote
    bins : number of bins of gradient lengths, from 0 to 1
    reduction : as in `weight_reduce_loss`; a mean divides by the sum of `label_weight`

    Returns () float, or (N, D) without reduction
    Source: Li et al. 2019, GHM-R.
    """
    difference = predicted - target
    distance = (difference * difference + mu * mu).sqrt()
    length = (difference / distance).abs().detach()
    valid = label_weight > 0
    total = max(label_weight.float().sum().item(), 1.0)
    edges = torch.arange(bins + 1, device=predicted.device) / bins
    # a length of 1 belongs to the last bin
    edges[-1] = 1e3

    weight = torch.zeros_like(length)
    filled = 0
    for index in range(bins):
        inside = (length >= edges[index]) & (length < edges[index + 1]) & valid
        count = inside.sum().item()
        if count > 0:
            filled += 1
            if counts is not None and momentum > 0:
                counts[index] = momentum * counts[index] + (1 - momentum) * count
                weight[inside] = total / counts[index]
            else:
                weight[inside] = total / count
    if filled > 0:
        weight /= filled
    return weight_reduce_loss(distance - mu, weight, reduction, total)
