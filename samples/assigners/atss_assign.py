from collections.abc import Sequence

import torch
from torch import Tensor

from opgrip.samples.assigners.assign_result import AssignResult, labels_of, nothing
from opgrip.samples.assigners.candidates import settle
from opgrip.samples.assigners.priors import grid_boxes
from opgrip.samples.boxes.bbox_overlaps import bbox_overlaps
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, truths: int, size: tuple[int, int]) -> Arguments:
    levels = grid_boxes(size)
    gt = draw.boxes(truths, (float(size[0]), float(size[1])))
    return torch.cat(levels), [len(anchors) for anchors in levels], gt, draw.integers(truths, high=80)


@sample(
    inputs,
    {
        "ATSS R50-FPN, 800x1333, training, 2 objects": (2, (800, 1344)),
        "ATSS R50-FPN, 800x1333, training, 7 objects": (7, (800, 1344)),
    },
    tags=(
        "IfElseBranch ForLoop DataDependentShape AdvancedIndexing InPlace Reduce Broadcast ViewAttribute "
        "BuiltInDataStructure Customized"
    ),
    url="https://github.com/open-mmlab/mmdetection/blob/v3.3.0/mmdet/models/task_modules/assigners/atss_assigner.py",
)
def atss_assign(
    priors: Tensor, num_level_priors: Sequence[int], gt_bboxes: Tensor, gt_labels: Tensor, topk: int = 9
) -> AssignResult:
    """Assign to each truth the nearby anchors with an overlap above the mean plus the standard deviation.

    Parameters
    ----------
    priors : (N, 4) float, x1 y1 x2 y2 in pixels, level by level
    num_level_priors : number of priors per level
    gt_bboxes, gt_labels : (M, 4) float and (M,) int64, the truths
    topk : number of candidate anchors per level and truth

    Returns an `AssignResult`; `max_overlaps` is -1e8 for unassigned anchors
    Source: Zhang et al. 2020 (ATSS), algorithm 1.
    """
    if len(gt_bboxes) == 0 or len(priors) == 0:
        return nothing(len(priors), priors)
    overlaps = bbox_overlaps(priors, gt_bboxes)
    centres, gt_centres = ((boxes[:, :2] + boxes[:, 2:]) / 2 for boxes in (priors, gt_bboxes))
    distances = (centres[:, None] - gt_centres).pow(2).sum(dim=2).sqrt()
    nearest, begin = [], 0
    for count in num_level_priors:
        level = distances[begin : begin + count]
        nearest.append(level.topk(min(topk, count), dim=0, largest=False).indices + begin)
        begin += count
    candidates = torch.cat(nearest)
    overlap = overlaps[candidates, torch.arange(len(gt_bboxes), device=candidates.device)]
    threshold = overlap.mean(dim=0) + overlap.std(dim=0)
    gt_inds, max_overlaps = settle(candidates, overlap >= threshold, overlaps, priors, gt_bboxes)
    return AssignResult(gt_inds, max_overlaps, labels_of(gt_inds, gt_labels))
