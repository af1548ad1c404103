import torch
from torch import Tensor

from opgrip.samples.coders.bbox2delta import bbox2delta
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw, positives: int, negatives: int, num_classes: int = 80, reg_decoded_bbox: bool = False
) -> Arguments:
    boxes = draw.boxes(positives)
    labels = draw.integers(positives, high=num_classes)
    return boxes, draw.boxes(negatives), draw.near(boxes), labels, num_classes, -1.0, reg_decoded_bbox


@sample(
    inputs,
    {
        "Faster R-CNN R50-FPN, 800x1333, training": (128, 384),
        "Faster R-CNN R50-FPN with GIoU loss, 800x1333, training": (128, 384, 80, True),
    },
    tags="IfElseBranch InPlace ViewAttribute Broadcast BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmdetection/blob/f08548bfd6d394a82566022709b5ce9e6b0a855e/mmdet/models/roi_heads/bbox_heads/bbox_head.py#L122",
)
def get_target_single(
    pos_priors: Tensor,
    neg_priors: Tensor,
    pos_gt_bboxes: Tensor,
    pos_gt_labels: Tensor,
    num_classes: int = 80,
    pos_weight: float = -1.0,
    reg_decoded_bbox: bool = False,
    target_means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    target_stds: tuple[float, float, float, float] = (0.1, 0.1, 0.2, 0.2),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the target classes and boxes of sampled boxes, and their weights.

    Parameters
    ----------
    pos_priors, neg_priors : (P, 4) and (Q, 4) float, x1 y1 x2 y2 in pixels
    pos_gt_bboxes, pos_gt_labels : (P, 4) float and (P,) int64: the truths of the positives
    num_classes : number of classes, also the label of the background
    pos_weight : weight of a positive's class, relative to 1 for negatives; 0 or less means 1
    reg_decoded_bbox : True if the targets are boxes, False if they are deltas
    target_means, target_stds : means and standard deviations that normalize deltas

    Returns labels (P + Q,) int64 and their weights (P + Q,) float, boxes and their weights (P + Q, 4) float, positives
    first
    Source: Girshick 2015 (Fast R-CNN), section 2.3.
    """
    positives, negatives = len(pos_priors), len(neg_priors)
    count = positives + negatives
    labels = pos_priors.new_full((count,), num_classes, dtype=torch.long)
    label_weights = pos_priors.new_zeros(count)
    bbox_targets, bbox_weights = pos_priors.new_zeros(count, 4), pos_priors.new_zeros(count, 4)
    if positives > 0:
        labels[:positives] = pos_gt_labels
        label_weights[:positives] = pos_weight if pos_weight > 0 else 1.0
        if reg_decoded_bbox:
            bbox_targets[:positives] = pos_gt_bboxes
        else:
            bbox_targets[:positives] = bbox2delta(pos_priors, pos_gt_bboxes, target_means, target_stds)
        bbox_weights[:positives] = 1
    if negatives > 0:
        label_weights[-negatives:] = 1.0
    return labels, label_weights, bbox_targets, bbox_weights
