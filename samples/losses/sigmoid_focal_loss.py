import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, rows: int, positives: int, classes: int = 80) -> Arguments:
    """Return random scores, most of them low, targets of 1 and 0, weights, and the number of positives as divisor.

    rows, classes : number of rows and columns of the scores
    positives : approximate number of rows with a class
    """
    pred = draw.normal(rows, classes, mean=-4.0, grad=True)
    labels = draw.integers(rows, high=classes)
    target = F.one_hot(labels, classes) * draw.mask(rows, 1, share=positives / rows)
    return pred, target, draw.mask(rows, share=0.9).float(), 2.0, 0.25, "mean", float(positives)


@sample(
    inputs,
    {
        "RetinaNet R50-FPN, 800x1344, training, one image, level P7": (7 * 11 * 9, 8),
        "RetinaNet R50-FPN, 800x1344, training, one image, level P5": (25 * 42 * 9, 30),
        "RetinaNet R50-FPN, 800x1344, training, one image, level P4": (50 * 84 * 9, 60),
    },
    tags="IfElseBranch ViewAttribute Broadcast Reduce",
    url="https://github.com/open-mmlab/mmclassification/blob/72cffac7b50a556824907721665e6705fd5045fb/mmcls/models/losses/focal_loss.py#L9",
)
def sigmoid_focal_loss(
    pred: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    gamma: float = 2.0,
    alpha: float = 0.25,
    reduction: str = "mean",
    avg_factor: float | None = None,
) -> Tensor:
    """Return binary cross entropy weighted by a power of each probability's error.

    Parameters
    ----------
    pred : (N, C) or (N,) float, scores
    target : same shape as `pred`, of any dtype, 1 or 0
    weight : (N,), of the rows
    gamma : exponent of the error
    alpha : weight of ones; zeros have weight 1 - alpha
    reduction, avg_factor : as in `weight_reduce_loss`

    Returns () float, or the shape of `pred` for the reduction "none"
    Source: Lin et al. 2017, "Focal Loss for Dense Object Detection", equation 5, as in MMClassification.
    """
    probability = pred.sigmoid()
    target = target.type_as(pred)
    off = (1 - probability) * target + probability * (1 - target)
    focus = (alpha * target + (1 - alpha) * (1 - target)) * off.pow(gamma)
    loss = F.binary_cross_entropy_with_logits(pred, target, reduction="none") * focus
    if weight is not None:
        weight = weight.float()
        if pred.dim() > 1:
            weight = weight.view(-1, 1)
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
