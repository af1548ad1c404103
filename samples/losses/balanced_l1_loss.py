import math

import torch
from torch import Tensor

from opgrip.samples.losses.targets import anchor_deltas
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import sample


@sample(
    lambda draw, anchors, positives, avg_factor, beta: (
        *anchor_deltas(draw, anchors, positives),
        "mean",
        avg_factor,
        beta,
    ),
    {
        "Libra R-CNN R50-FPN, 800x1333, training, boxes of the second stage, 2 images": (256, 256, 1024.0, 1.0),
        "Libra RetinaNet R50-FPN, 800x1333, training, anchors of stride 16, 2 images": (75600, 159, 206.0, 0.11),
        "Libra RetinaNet R50-FPN, 800x1333, training, anchors of stride 8, 2 images": (302400, 34, 206.0, 0.11),
    },
    tags="IfElseBranch Reduce",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/models/losses/balanced_l1_loss.py#L13",
)
def balanced_l1_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    beta: float = 1.0,
    alpha: float = 0.5,
    gamma: float = 1.5,
) -> Tensor:
    """Return the balanced L1 loss: logarithmic below `beta`, linear above.

    Parameters
    ----------
    predicted, target : (N, D) float
    weight, reduction, avg_factor : as in `weight_reduce_loss`
    beta : distance from which the loss is linear
    alpha : smaller values give larger gradients for small distances
    gamma : gradient of the linear part

    Returns () float, or (N, D) without reduction
    Source: Pang et al. 2019, section 3.3.
    """
    if target.numel() == 0:
        # the mean of an empty tensor is NaN
        loss = predicted.sum() * 0
    else:
        distance = (predicted - target).abs()
        # makes the gradients of both parts equal at `beta`
        growth = math.exp(gamma / alpha) - 1
        near = alpha / growth * (growth * distance + 1) * (growth * distance / beta + 1).log() - alpha * distance
        loss = torch.where(distance < beta, near, gamma * distance + gamma / growth - alpha * beta)
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
