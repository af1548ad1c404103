import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.assigners.assign_result import AssignResult, nothing
from opgrip.samples.assigners.priors import grid_points
from opgrip.samples.boxes.bbox_overlaps import bbox_overlaps
from opgrip.samples.sample import Draw, sample

FAR = -100000000.0
"""Overlap where nothing is assigned."""
EPSILON = 1e-7
"""Least overlap that a logarithm is taken of."""


def inputs(
    draw: Draw, truths: int, size: tuple[int, int] = (640, 640), classes: int = 80, within: float = 640.0
) -> tuple[Tensor, ...]:
    """Points of all levels with their strides, predictions of boxes around them, and truths in a corner."""
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
    project="MMDetection",
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
    """Assign to each truth the points of least cost: of class, overlap and distance from its centre.

    Parameters
    ----------
    pred_bboxes : (N, 4) float, x1 y1 x2 y2 in pixels
    pred_scores : (N, C) float, logits
    priors : (N, 4) float, x y and stride, twice, in pixels
    gt_bboxes, gt_labels : (M, 4) float and (M,) int64, the truths
    topk : a truth has at most so many points, and as many as their overlaps sum up to
    soft_center_radius : distance in strides from which a centre's cost is above one
    iou_weight : of the overlap's cost

    Returns `max_overlaps` are -1e8 where nothing is assigned
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
    """(V, M): how far scores (V, C) are from the overlap with a truth at its class, and from 0 at others."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    targets = (gt_labels[:, None] == classes).float() * overlaps[:, :, None]
    repeated = logits[:, None, :].expand_as(targets)
    entropy = functional.binary_cross_entropy_with_logits(repeated, targets, reduction="none")
    return (entropy * (targets - repeated.sigmoid()).abs().pow(2)).sum(dim=2)


def _match(cost: Tensor, overlaps: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of boxes (V,), whether any truth has it; and of those, which truth, and its overlap."""
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
