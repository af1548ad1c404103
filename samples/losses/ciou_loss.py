import math

import torch
from torch import Tensor

from opgrip.samples.losses.diou_loss import inputs
from opgrip.samples.losses.overlaps import centre_distance, overlap_ratio
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import sample


def _angle(boxes: Tensor, eps: float) -> Tensor:
    """Return the angles (N,) float, in radians, whose tangent is the width of a box divided by its height plus `eps`.

    boxes : (N, 4) float, x1 y1 x2 y2
    """
    return ((boxes[:, 2] - boxes[:, 0]) / (boxes[:, 3] - boxes[:, 1] + eps)).atan()


@sample(
    inputs,
    {
        "Faster R-CNN R50-FPN, 800x1333, training, boxes of the second stage, 2 images": (2,),
        "Faster R-CNN R50-FPN, 800x1333, training, boxes of the second stage, 16 images": (16,),
    },
    tags="IfElseBranch Reduce ViewAttribute",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/models/losses/iou_loss.py#L177",
)
def ciou_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    eps: float = 1e-7,
) -> Tensor:
    """Return complete-IoU loss: 1 minus the overlap, plus terms for the distance of centres and the aspect ratio.

    Parameters
    ----------
    predicted, target : (N, 4) float, x1 y1 x2 y2
    weight, reduction, avg_factor : as in `weight_reduce_loss`, for losses (N,)
    eps : added to the union, to the diagonal of the enclosing box and to heights

    Returns () float, or (N,) without reduction; NaN for a box exactly equal to its target, as in the original
    Source: Zheng et al. 2021, arXiv 2005.03572; the aspect ratio only counts above an overlap of 0.5.
    """
    iou = overlap_ratio(predicted, target, eps)
    unlike = 4 / math.pi**2 * (_angle(target, eps) - _angle(predicted, eps)) ** 2
    with torch.no_grad():
        share = (iou > 0.5).float() * unlike / (1 - iou + unlike)
    ciou = iou - (centre_distance(predicted, target, eps) + share * unlike)
    return weight_reduce_loss(1 - ciou.clamp(min=-1.0, max=1.0), weight, reduction, avg_factor)
