import torch
from torch import Tensor

from opgrip.samples.losses.overlaps import area, enclosing_size, shared_area
from opgrip.samples.losses.targets import matched_boxes
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int, matched: int, shift: float = 0.1) -> Arguments:
    """Return `boxes` predicted boxes, their truths, and weights, which are 0 for boxes without a truth.

    matched : number of boxes with a truth
    shift : distance of predictions from their truths, relative to the size of the truth
    """
    predicted, truths = matched_boxes(draw, boxes, shift=shift)
    weight = torch.zeros(boxes)
    weight[draw.permutation(boxes)[:matched]] = 1
    return predicted, truths * weight[:, None], weight, "mean", float(matched), 1e-6


@sample(
    inputs,
    {
        "ATSS R50-FPN, 800x1333, training, positive anchors of stride 16, 2 images": (39, 39),
        "DETR R50, 800x1333, training, queries of one decoder layer, 2 images": (200, 14, 1.0),
    },
    tags="IfElseBranch Reduce ViewAttribute",
    url="https://github.com/open-mmlab/mmdetection/blob/276b7c300f72ab824c9a1087a0f7a11154e00564/mmdet/models/losses/iou_loss.py#L102",
)
def giou_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    eps: float = 1e-7,
) -> Tensor:
    """Return 1 minus generalized intersection over union, from 0 to 2.

    Parameters
    ----------
    predicted, target : (N, 4) float, x1 y1 x2 y2
    weight, reduction, avg_factor : as in `weight_reduce_loss`, for losses (N,)
    eps : least area of a union and of an enclosing box

    Returns () float, or (N,) without reduction
    Source: Rezatofighi et al. 2019, algorithm 2.
    """
    overlap = shared_area(predicted, target)
    union = (area(predicted) + area(target) - overlap).clamp(min=eps)
    size = enclosing_size(predicted, target)
    enclosing = (size[:, 0] * size[:, 1]).clamp(min=eps)
    loss = 1 - (overlap / union - (enclosing - union) / enclosing)
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
