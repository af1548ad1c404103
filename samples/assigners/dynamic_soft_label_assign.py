import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.assigners.assign_result import AssignResult, nothing
from opgrip.samples.assigners.priors import grid_points
from opgrip.samples.boxes.bbox_overlaps import bbox_overlaps
from opgrip.samples.sample import Arguments, Draw, sample

FAR = -100000000.0
"""Overlap of boxes without an assigned truth."""
EPSILON = 1e-7
"""Lower limit of an overlap before its logarithm is taken."""


def inputs(
    draw: Draw, truths: int, size: tuple[int, int] = (640, 640), classes: int = 80, within: float = 640.0
) -> Arguments:
    points = torch.cat(grid_points(size, (8, 16, 32)))
    centre, stride = points[:, :2], points[:, 2:]
    reach = draw.uniform(len(points), 4, low=0.5, high=6.0) * stride
    predicted = torch.cat([centre - reach[:, :2], centre + reach[:, 2:]], dim=1)
    gt = draw.boxes(truths, (within, within))
    scores = draw.normal(len(points), classes, mean=-4.0)
    return predicted, scores, torch.cat([points, stride], dim=1), gt, draw.integers(truths, high=classes)


@sample(
    inputs,
    {
        "RTMDet-s, 640x640, training, 2 small objects": (2, (640, 640), 80, 128.0),
        "RTMDet-s, 640x640, training, 20 objects of a mosaic": (20,),
    },
    tags=(
        "IfElseBranch ForLoop InputAware DataDependentShape AdvancedIndexing InPlace Reduce Broadcast "
        "ViewAttribute BuiltInDataStructure Customized"
    ),
    url="https://github.com/open-mmlab/mmdetection/blob/v3.3.0/mmdet/models/task_modules/assigners/dynamic_soft_label_assigner.py",
)
def dynamic_soft_label_assign(
    pred_bboxes: Tensor,
    pred_scores: Tensor,
    priors: Tensor,
    gt_bboxes: Tensor,
    gt_labels: Tensor,
    topk: int = 13,
    soft_center_radius: float = 3.0,
    iou_weight: float = 3.0,
) -> AssignResult:
    """Assign to each truth the points of least cost, the sum of class, overlap and centre-distance costs.

    Parameters
    ----------
    pred_bboxes : (N, 4) float, x1 y1 x2 y2 in pixels
    pred_scores : (N, C) float, logits
    priors : (N, 4) float, x y stride stride, in pixels
    gt_bboxes, gt_labels : (M, 4) float and (M,) int64, the truths
    topk : most points per truth; the number is the rounded sum of their overlaps
    soft_center_radius : distance in strides from which the cost of a centre exceeds 1
    iou_weight : weight of the overlap's cost

    Returns an `AssignResult`; `max_overlaps` is -1e8 for unassigned points
    Source: Lyu et al. 2022 (RTMDet), section 3.3; the choice of points: Ge et al. 2021 (OTA, YOLOX).
    """
    count, truths = len(pred_bboxes), len(gt_bboxes)
    if truths == 0 or count == 0:
        return nothing(count, pred_bboxes)
    points = priors[:, :2]
    margins = torch.cat([points[:, None] - gt_bboxes[:, :2], gt_bboxes[:, 2:] - points[:, None]], dim=2)
    valid = (margins.amin(dim=2) > 0).any(dim=1)
    boxes, logits, places = pred_bboxes[valid], pred_scores[valid], priors[valid]
    if len(boxes) == 0:
        return nothing(count, pred_bboxes)
    distance = (places[:, None, :2] - (gt_bboxes[:, :2] + gt_bboxes[:, 2:]) / 2).pow(2).sum(dim=2).sqrt()
    centre_cost = torch.pow(10, distance / places[:, 2:3] - soft_center_radius)
    overlaps = bbox_overlaps(boxes, gt_bboxes)
    overlap_cost = -(overlaps + EPSILON).log() * iou_weight
    cost = _class_cost(logits, overlaps, gt_labels) + overlap_cost + centre_cost
    matched, owners, matched_overlaps = _match(cost, overlaps, topk)
    positives = torch.nonzero(valid).squeeze(1)[matched]
    result = nothing(count, pred_bboxes)._replace(max_overlaps=pred_bboxes.new_full((count,), FAR))
    result.gt_inds[positives] = owners + 1
    result.labels[positives] = gt_labels[owners]
    result.max_overlaps[positives] = matched_overlaps
    return result


def _class_cost(logits: Tensor, overlaps: Tensor, gt_labels: Tensor) -> Tensor:
    """Return the cost (V, M) of assigning each of V boxes to each of M truths, computed from the scores of the classes.

    The cost is a binary cross entropy over all classes, with the overlap as target for the class of the truth and 0 for
    all other classes.

    logits : (V, C) float, scores of C classes
    overlaps : (V, M) float, intersection over union of boxes and truths
    gt_labels : (M,) int64, classes of the truths
    """
    classes = torch.arange(logits.shape[1], device=logits.device)
    targets = (gt_labels[:, None] == classes).float() * overlaps[:, :, None]
    repeated = logits[:, None, :].expand_as(targets)
    entropy = functional.binary_cross_entropy_with_logits(repeated, targets, reduction="none")
    return (entropy * (targets - repeated.sigmoid()).abs().pow(2)).sum(dim=2)


def _match(cost: Tensor, overlaps: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the boxes of least cost for each truth; return which boxes are chosen, their truths and their overlaps.

    Parameters
    ----------
    cost : (V, M) float, cost of assigning each of V boxes to each of M truths
    overlaps : (V, M) float, intersection over union of boxes and truths
    topk : a truth gets as many boxes as the sum of its `topk` largest overlaps, rounded down, and at least one

    Returns
    -------
    (V,) bool, True for the K chosen boxes; (K,) int64, index of the truth of each chosen box; (K,) float, its overlap
    """
    matching = torch.zeros_like(cost, dtype=torch.uint8)
    most = overlaps.topk(min(topk, len(overlaps)), dim=0).values.sum(dim=0)
    for truth, box_count in enumerate(most.int().clamp(min=1).tolist()):
        matching[cost[:, truth].topk(box_count, largest=False).indices, truth] = 1
    contested = matching.sum(dim=1) > 1
    if contested.any():
        cheapest = cost[contested].argmin(dim=1)
        matching[contested] = 0
        matching[contested, cheapest] = 1
    matched = matching.sum(dim=1) > 0
    return matched, matching[matched].argmax(dim=1), (matching * overlaps).sum(dim=1)[matched]
