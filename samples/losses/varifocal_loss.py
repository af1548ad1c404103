import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, rows: int, positives: int, classes: int = 80) -> Arguments:
    """Return random scores, most of them low, targets, and the number of positives as divisor.

    rows, classes : number of rows and columns of the scores
    positives : approximate number of rows with a class; their targets are random overlaps of at least 0.3
    """
    pred = draw.normal(rows, classes, mean=-4.0, grad=True)
    labels = F.one_hot(draw.integers(rows, high=classes), classes)
    target = labels * draw.mask(rows, 1, share=positives / rows) * draw.uniform(rows, 1, low=0.3)
    return pred, target, None, 0.75, 2.0, True, "mean", float(positives)


@sample(
    inputs,
    {
        "RT-DETR R50, COCO, training, 4 images of 300 queries": (4 * 300, 28),
        "VFNet R50-FPN, 800x1344, training, one image, 22,400 points of 5 levels": (22400, 60),
    },
    tags="IfElseBranch Reduce",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/models/losses/varifocal_loss.py#L11",
)
def varifocal_loss(
    pred: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    alpha: float = 0.75,
    gamma: float = 2.0,
    iou_weighted: bool = True,
    reduction: str = "mean",
    avg_factor: float | None = None,
) -> Tensor:
    """Return binary cross entropy with overlaps as targets.

    Parameters
    ----------
    pred : (N, C) float, scores
    target : (N, C) float, the overlap of a positive with its truth, zero elsewhere
    weight : (N, C) float
    alpha : weight of negatives
    gamma : exponent of the error of negatives' probabilities
    iou_weighted : True to weight a positive by its overlap, False for 1
    reduction, avg_factor : as in `weight_reduce_loss`

    Returns () float, or (N, C) for the reduction "none"
    Source: Zhang et al. 2021, "VarifocalNet", equation 2, as in MMDetection.
    """
    target = target.type_as(pred)
    positive = (target > 0).float()
    off = alpha * (pred.sigmoid() - target).abs().pow(gamma) * (target <= 0).float()
    focus = (target * positive if iou_weighted else positive) + off
    loss = F.binary_cross_entropy_with_logits(pred, target, reduction="none") * focus
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
