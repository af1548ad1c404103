import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, points: int, positives: int, avg_factor: float, classes: int = 80) -> Arguments:
    """Return logits of `points` points, labels and qualities of `positives` random ones of them, weights of 1, and the
    divisor `avg_factor`.

    classes : number of classes without the background
    """
    chosen = draw.permutation(points)[:positives]
    labels = torch.full((points,), classes)
    labels[chosen] = draw.integers(positives, high=classes)
    quality = torch.zeros(points)
    quality[chosen] = draw.uniform(positives)
    logits = draw.normal(points, classes, mean=-4.6, grad=True)
    return logits, (labels, quality), torch.ones(points), "mean", avg_factor


@sample(
    inputs,
    {
        "GFL R50-FPN, 800x1333, training, points of stride 16, one image": (4200, 20, 65.0),
        "GFL R50-FPN, 800x1333, training, points of stride 16, 2 images": (8400, 39, 129.0),
        "GFL R50-FPN, 800x1333, training, points of stride 8, 2 images": (33600, 90, 129.0),
    },
    tags="IfElseBranch DataDependentShape AdvancedIndexing InPlace Reduce ViewAttribute BuiltInDataStructure",
    project="MMDetection",
    url="https://arxiv.org/abs/2006.04388",
)
def quality_focal_loss(
    predicted: Tensor,
    target: tuple[Tensor, Tensor],
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    beta: float = 2.0,
) -> Tensor:
    """Return cross entropy with the quality of the box, weighted by the distance of the score from the quality.

    Parameters
    ----------
    predicted : (N, C) float logits
    target : labels (N,) int64, C for none, and qualities (N,) float, from 0 to 1
    weight, reduction, avg_factor : as in `weight_reduce_loss`, for losses (N,)
    beta : exponent of the weight

    Returns () float, or (N,) without reduction
    Source: Li et al. 2020, the quality focal loss.
    """
    labels, quality = target
    scores = predicted.sigmoid()
    nothing = torch.zeros_like(predicted)
    loss = functional.binary_cross_entropy_with_logits(predicted, nothing, reduction="none") * scores.pow(beta)
    positive = ((labels >= 0) & (labels < predicted.shape[1])).nonzero().squeeze(1)
    classes = labels[positive]
    target_quality = quality[positive]
    entropy = functional.binary_cross_entropy_with_logits(
        predicted[positive, classes], target_quality, reduction="none"
    )
    loss[positive, classes] = entropy * (target_quality - scores[positive, classes]).abs().pow(beta)
    return weight_reduce_loss(loss.sum(dim=1), weight, reduction, avg_factor)
