from torch import Tensor
from torch.nn import functional

from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int, avg_factor: float = 4.0, largest: int = 16) -> Arguments:
    weight = draw.uniform(boxes)[:, None].expand(-1, 4).reshape(-1)
    return (
        draw.normal(4 * boxes, largest + 1, grad=True),
        draw.uniform(4 * boxes, high=largest - 0.1),
        weight,
        "mean",
        avg_factor,
    )


@sample(
    inputs,
    {
        "GFL R50-FPN, 800x1333, training, positives of stride 16, 2 images": (39,),
        "GFL R50-FPN, 800x1333, training, positives of stride 8, 2 images": (90,),
    },
    tags="IfElseBranch Reduce",
    project="MMDetection",
    url="https://arxiv.org/abs/2006.04388",
)
def distribution_focal_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
) -> Tensor:
    """Return cross entropy with the integers below and above the distance, weighted by their proximity.

    Parameters
    ----------
    predicted : (N, n + 1) float logits of the distances from 0 to n
    target : (N,) float, 0 <= target < n
    weight, reduction, avg_factor : as in `weight_reduce_loss`, for losses (N,)

    Returns () float, or (N,) without reduction
    Source: Li et al. 2020, the distribution focal loss.
    """
    below = target.long()
    above = below + 1
    loss = functional.cross_entropy(predicted, below, reduction="none") * (above.to(target.dtype) - target)
    loss = loss + functional.cross_entropy(predicted, above, reduction="none") * (target - below.to(target.dtype))
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
