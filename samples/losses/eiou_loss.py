import torch
from torch import Tensor

from opgrip.samples.losses.overlaps import area
from opgrip.samples.losses.smooth_l1_loss import smoothed
from opgrip.samples.losses.targets import matched_boxes
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import sample


@sample(
    lambda draw, boxes: matched_boxes(draw, boxes, size=(640.0, 640.0), shift=0.3),
    {
        "sizes of YuNet, 640x640, training, ten priors for each of ten faces": (100,),
        "sizes of YuNet, 640x640, training, ten priors for each of ten faces, 16 images": (1600,),
    },
    tags="IfElseBranch Reduce ViewAttribute",
    project="MMDetection",
    url="https://arxiv.org/abs/2112.01793",
)
def eiou_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    smooth_point: float = 0.1,
    eps: float = 1e-7,
) -> Tensor:
    """Return 1 minus extended intersection over union, smoothed near zero.

    Parameters
    ----------
    predicted, target : (N, 4) float, x1 y1 x2 y2
    weight, reduction, avg_factor : as in `weight_reduce_loss`, for losses (N,)
    smooth_point : value below which the loss is quadratic
    eps : added to the union

    Returns () float, or (N,) without reduction
    Source: Peng and Yu 2021, as in MMDetection.
    """
    outer = torch.min(predicted[:, :2], target[:, :2])
    # sides of the intersection relative to the corner of the enclosing box; swapped if the boxes do not overlap
    near = torch.max(predicted[:, :2], target[:, :2]) - outer
    far = torch.min(predicted[:, 2:], target[:, 2:]) - outer
    low, high = torch.min(near, far), torch.max(near, far)
    gained = far[:, 0] * far[:, 1] + low[:, 0] * low[:, 1]
    overlap = gained - near[:, 0] * high[:, 1] - high[:, 0] * near[:, 1]
    union = area(predicted) + area(target) - overlap + eps
    return weight_reduce_loss(smoothed(1 - overlap / union, smooth_point), weight, reduction, avg_factor)
