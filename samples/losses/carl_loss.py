from torch import Tensor

from opgrip.samples.losses.smooth_l1_loss import smooth_l1_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw,
    boxes: int,
    positives: int,
    per_class: bool,
    beta: float,
    avg_factor: float,
    num_class: int = 80,
) -> Arguments:
    """Return random scores and deltas of `boxes` boxes.

    Parameters
    ----------
    positives : number of boxes of a class; the others are background
    per_class : True for deltas of each class and scores that include the background
    beta, avg_factor : passed to `carl_loss`
    num_class : number of classes without the background
    """
    labels = draw.integers(boxes, low=num_class, high=num_class + 1)
    labels[draw.permutation(boxes)[:positives]] = draw.integers(positives, high=num_class)
    scores = draw.normal(boxes, num_class + 1 if per_class else num_class, grad=True)
    deltas = draw.normal(boxes, 4 * num_class if per_class else 4, std=0.1, grad=True)
    return scores, labels, deltas, draw.normal(boxes, 4), beta, 1.0, 0.2, avg_factor, not per_class, num_class


@sample(
    inputs,
    {
        "PISA Faster R-CNN R50-FPN, 800x1333, training, boxes of the second stage, 2 images": (
            1024,
            256,
            True,
            1.0,
            1024.0,
        ),
        "PISA RetinaNet R50-FPN, 800x1333, training, all anchors of an image": (201600, 103, False, 0.11, 103.0),
    },
    tags=(
        "IfElseBranch DataDependentShape AdvancedIndexing InPlace Reduce Broadcast ViewAttribute BuiltInDataStructure"
    ),
    url="https://github.com/open-mmlab/mmdetection/blob/bde7b4b7eea9dd6ee91a486c6996b2d68662366d/mmdet/models/losses/pisa_loss.py#L123",
)
def carl_loss(
    cls_score: Tensor,
    labels: Tensor,
    bbox_pred: Tensor,
    bbox_targets: Tensor,
    beta: float = 1.0,
    k: float = 1.0,
    bias: float = 0.2,
    avg_factor: float | None = None,
    sigmoid: bool = False,
    num_class: int = 80,
) -> dict[str, Tensor]:
    """Return the classification-aware regression loss, which also has a gradient for the scores.

    Parameters
    ----------
    cls_score : (N, num_class), or (N, num_class + 1) with the background, float logits
    labels : (N,) int64, below num_class for positives
    bbox_pred : (N, 4), or (N, 4 * num_class) for class-wise deltas, float
    bbox_targets : (N, 4) float
    beta : as in `smooth_l1_loss`
    k, bias : weights are (bias + (1 - bias) * score) to the power of k, scaled to sum to their number
    avg_factor : divisor of the sum, None for N
    sigmoid : True for a sigmoid of each class, False for a softmax over classes

    Returns `loss_carl` : (1,) float
    Source: Cao et al. 2020.
    """
    positive = ((labels >= 0) & (labels < num_class)).nonzero().reshape(-1)
    if positive.numel() == 0:
        return {"loss_carl": cls_score.sum()[None] * 0.0}
    classes = labels[positive]
    scores = (cls_score.sigmoid() if sigmoid else cls_score.softmax(dim=-1))[positive, classes]
    weight = (bias + (1 - bias) * scores).pow(k)
    weight *= len(scores) / weight.sum()
    if bbox_pred.shape[-1] > 4:
        deltas = bbox_pred.view(len(bbox_pred), -1, 4)[positive, classes]
    else:
        deltas = bbox_pred[positive]
    distance = smooth_l1_loss(deltas, bbox_targets[positive], reduction="none", beta=beta)
    divisor = len(bbox_targets) if avg_factor is None else avg_factor
    return {"loss_carl": (distance / divisor * weight[:, None]).sum()[None]}
