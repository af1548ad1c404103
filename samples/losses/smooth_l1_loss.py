import torch
from torch import Tensor

from opgrip.samples.losses.targets import anchor_deltas
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import sample


def smoothed(distance: Tensor, beta: float) -> Tensor:
    """Return the smooth L1 loss of each distance: quadratic below `beta`, linear above, continuously differentiable.

    distance : (N, D) float, absolute differences
    """
    return torch.where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta)


@sample(
    lambda draw, anchors, positives, avg_factor, beta: (
        *anchor_deltas(draw, anchors, positives),
        "mean",
        avg_factor,
        beta,
    ),
    {
        "Cascade R-CNN R50-FPN, 800x1333, training, boxes of the first stage, 2 images": (256, 256, 1024.0, 1.0),
        "Cascade R-CNN R50-FPN, 800x1333, training, anchors of stride 8, 2 images": (100800, 46, 512.0, 1 / 9),
        "Cascade R-CNN R50-FPN, 800x1333, training, anchors of stride 4, 2 images": (403200, 9, 512.0, 1 / 9),
    },
    tags="IfElseBranch Reduce",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/models/losses/smooth_l1_loss.py#L12",
)
def smooth_l1_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    beta: float = 1.0,
) -> Tensor:
    """Return the smooth L1 loss: quadratic below `beta` and linear above.

    Parameters
    ----------
    predicted, target : (N, D) float
    weight, reduction, avg_factor : as in `weight_reduce_loss`
    beta : distance from which the loss is linear

    Returns () float, or (N, D) without reduction
    Source: Girshick 2015, equation 3; beta as in Ren et al. 2015.
    """
    # the mean of an empty tensor is NaN
    loss = predicted.sum() * 0 if target.numel() == 0 else smoothed((predicted - target).abs(), beta)
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
