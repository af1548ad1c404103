import torch
from torch import Tensor

from opgrip.samples.losses.smooth_l1_loss import smoothed
from opgrip.samples.losses.targets import matched_boxes
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import sample


@sample(
    lambda draw, boxes, avg_factor: (*matched_boxes(draw, boxes), torch.ones(boxes, 4), "mean", avg_factor),
    {
        "GA-RetinaNet R50-FPN, 800x1333, training, shapes of stride 16, 2 images": (54, 512.0),
        "Faster R-CNN R50-FPN, 800x1333, training, boxes of the second stage, 2 images": (256, 1024.0),
    },
    tags="IfElseBranch Reduce ViewAttribute BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/models/losses/iou_loss.py#L55",
)
def bounded_iou_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    beta: float = 0.2,
    eps: float = 1e-3,
) -> Tensor:
    """Return 1 minus upper bounds of the overlap given by each of x, y, width and height, smoothed below `beta`.

    Parameters
    ----------
    predicted, target : (N, 4) float, x1 y1 x2 y2; the target gets no gradient
    weight, reduction, avg_factor : as in `weight_reduce_loss`, for losses (N, 4) of x, y, width and height
    beta : as in `smooth_l1_loss`
    eps : added to divisors

    Returns () float, or (N, 4) without reduction
    Source: Tychsen-Smith and Petersson 2018.
    """
    target = target.detach()
    size = predicted[:, 2:] - predicted[:, :2]
    target_size = target[:, 2:] - target[:, :2]
    shift = ((target[:, :2] + target[:, 2:]) / 2 - (predicted[:, :2] + predicted[:, 2:]) / 2).abs()
    by_centre = ((target_size - 2 * shift) / (target_size + 2 * shift + eps)).clamp(min=0)
    by_size = torch.min(target_size / (size + eps), size / (target_size + eps))
    lost = torch.cat([1 - by_centre, 1 - by_size], dim=1)
    return weight_reduce_loss(smoothed(lost, beta), weight, reduction, avg_factor)
