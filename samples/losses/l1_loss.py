from torch import Tensor

from opgrip.samples.losses.targets import anchor_deltas
from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import sample


@sample(
    lambda draw, anchors, positives, avg_factor: (*anchor_deltas(draw, anchors, positives), "mean", avg_factor),
    {
        "DETR R50, 800x1333, training, queries of one decoder layer, 2 images": (200, 14, 14.0),
        "RetinaNet R50-FPN, 800x1333, training, anchors of stride 16, 2 images": (75600, 159, 206.0),
        "Faster R-CNN R50-FPN, 800x1333, training, anchors of stride 4, 2 images": (403200, 9, 512.0),
    },
    tags="IfElseBranch Reduce",
    url="https://github.com/open-mmlab/mmdetection/blob/276b7c300f72ab824c9a1087a0f7a11154e00564/mmdet/models/losses/smooth_l1_loss.py#L37",
)
def l1_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
) -> Tensor:
    """Return absolute differences.

    Parameters
    ----------
    predicted, target : (N, D) float
    weight, reduction, avg_factor : as in `weight_reduce_loss`

    Returns () float, or (N, D) without reduction
    Source: MMDetection.
    """
    # the mean of an empty tensor is NaN
    loss = predicted.sum() * 0 if target.numel() == 0 else (predicted - target).abs()
    return weight_reduce_loss(loss, weight, reduction, avg_factor)
