from torch import Tensor

from opgrip.samples.losses.overlaps import area, shared_area
from opgrip.samples.losses.targets import matched_boxes
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int, size: tuple[float, float], mode: str, eps: float, weighted: bool) -> Arguments:
    """Return `boxes` predicted boxes and their truths, with random weights and a mean, or without weights and with a
    sum.

    size : height and width of the image in pixels
    mode, eps : passed to `iou_loss`
    weighted : True for weights such as the centreness of points
    """
    weight = draw.uniform(boxes) if weighted else None
    reduction, avg_factor = ("mean", float(weight.sum())) if weight is not None else ("sum", None)
    return *matched_boxes(draw, boxes, size), weight, reduction, avg_factor, mode, eps


@sample(
    inputs,
    {
        "YOLOX-S, 640x640, training, matched priors of 8 images": (55, (640.0, 640.0), "square", 1e-16, False),
        "FCOS R50-FPN, 800x1333, training, points inside of boxes, 2 images": (270, (800.0, 1333.0), "log", 1e-6, True),
    },
    tags="IfElseBranch Reduce ViewAttribute",
    url="https://github.com/open-mmlab/mmdetection/blob/276b7c300f72ab824c9a1087a0f7a11154e00564/mmdet/models/losses/iou_loss.py#L16",
)
def iou_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    mode: str = "log",
    eps: float = 1e-6,
) -> Tensor:
    """Return the loss of intersection over union: 1 minus it, 1 minus its square, or its negative logarithm.

    Parameters
    ----------
    predicted, target : (N, 4) float, x1 y1 x2 y2
    weight, reduction, avg_factor : as in `weight_reduce_loss`, for losses (N,)
    mode : `log`, `linear` or `square`
    eps : least overlap, so that its logarithm is finite

    Returns () float, or (N,) without reduction

    Raises
    ------
    ValueError : if the mode is unknown

    Source: Yu et al. 2016 for the logarithm; Rezatofighi et al. 2019, algorithm 2, for the linear loss.
    """
    overlap = shared_area(predicted, target)
    union = (area(predicted) + area(target) - overlap).clamp(min=1e-6)
    iou = (overlap / union).clamp(min=eps)
    if mode == "log":
        loss = -iou.log()
    elif mode == "linear":
        loss = 1 - iou
    elif mode == "square":
        loss = 1 - iou * iou
    else:
        raise ValueError(f"unknown mode {mode}: choose log, linear or square")
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
