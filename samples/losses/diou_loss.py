import torch
from torch import Tensor

from opgrip.samples.losses.overlaps import centre_distance, overlap_ratio
from opgrip.samples.losses.targets import matched_boxes
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, images: int) -> Arguments:
    """Return predicted and true boxes of the second stage's positives, 128 of 512 boxes for each of `images` images,
    and the divisor 512 per image.
    """
    count = images * 128
    return *matched_boxes(draw, count), torch.ones(count), "mean", images * 512.0


@sample(
    inputs,
    {
        "Faster R-CNN R50-FPN, 800x1333, training, boxes of the second stage, 2 images": (2,),
        "Faster R-CNN R50-FPN, 800x1333, training, boxes of the second stage, 16 images": (16,),
    },
    tags="IfElseBranch Reduce ViewAttribute",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/models/losses/iou_loss.py#L122",
)
def diou_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    eps: float = 1e-7,
) -> Tensor:
    """Return distance-IoU loss: 1 minus the overlap, plus the normalized distance of the centres.

    Parameters
    ----------
    predicted, target : (N, 4) float, x1 y1 x2 y2
    weight, reduction, avg_factor : as in `weight_reduce_loss`, for losses (N,)
    eps : added to the union and to the diagonal of the enclosing box

    Returns () float, or (N,) without reduction
    Source: Zheng et al. 2020, equation 7.
    """
    iou = overlap_ratio(predicted, target, eps)
    loss = 1 - (iou - centre_distance(predicted, target, eps))
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
