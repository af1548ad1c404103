import math

import torch
from torch import Tensor

from opgrip.samples.losses.overlaps import centre_shift, enclosing_size, overlap_ratio
from opgrip.samples.losses.targets import matched_boxes
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int) -> Arguments:
    weight = draw.uniform(boxes)
    return *matched_boxes(draw, boxes, size=(640.0, 640.0)), weight, "mean", float(weight.sum())


@sample(
    inputs,
    {
        "sizes of YOLOv6-N, 640x640, training, 13 anchors for each of 7 objects": (91,),
        "sizes of YOLOv6-N, 640x640, training, 13 anchors for each of 7 objects, 32 images": (2912,),
    },
    tags="IfElseBranch Reduce ViewAttribute Broadcast",
    project="MMDetection",
    url="https://arxiv.org/abs/2205.12740",
)
def siou_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    eps: float = 1e-7,
    neg_gamma: bool = False,
) -> Tensor:
    """Return 1 minus intersection over union, plus costs of the angle and distance of centres and of the shapes.

    Parameters
    ----------
    predicted, target : (N, 4) float, x1 y1 x2 y2
    weight, reduction, avg_factor : as in `weight_reduce_loss`, for losses (N,)
    eps : added to the union, sizes and shifts of centres, and least size of the enclosing box
    neg_gamma : True for a negative exponent of the distance, as in the paper but not in MMDetection's default

    Returns () float, or (N,) without reduction
    Source: Gevorgyan 2022.
    """
    iou = overlap_ratio(predicted, target, eps)

    shift = centre_shift(predicted, target) + eps
    sines = shift.abs() / (shift * shift).sum(dim=1).sqrt()[:, None]
    # sine of the angle to the nearer axis
    sine = torch.where(sines[:, 0] > math.sqrt(0.5), sines[:, 1], sines[:, 0])
    angle = (2 * sine.asin() - math.pi / 2).cos()

    away = (shift / enclosing_size(predicted, target, eps)) ** 2
    gamma = angle - 2 if neg_gamma else 2 - angle
    distance = 2 - (gamma[:, None] * away).exp().sum(dim=1)

    size = predicted[:, 2:] - predicted[:, :2] + eps
    target_size = target[:, 2:] - target[:, :2] + eps
    unlike = (size - target_size).abs() / torch.max(size, target_size)
    shape = ((1 - (-unlike).exp()) ** 4).sum(dim=1)

    siou = iou - 0.5 * (distance + shape)
    return weight_reduce_loss(1 - siou.clamp(min=-1.0, max=1.0), weight, reduction, avg_factor)
