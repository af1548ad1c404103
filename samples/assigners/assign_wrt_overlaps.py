from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from opgrip.samples.anchors.gen_base_anchors import RATIOS, RETINANET
from opgrip.samples.assigners.assign_result import AssignResult, labels_of, nothing
from opgrip.samples.assigners.priors import grid_boxes
from opgrip.samples.boxes.bbox_overlaps import bbox_overlaps
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw,
    truths: int,
    thresholds: tuple[float, float, float],
    anchors: Mapping[str, Any] | None = None,
    proposals: int = 0,
    match_low_quality: bool = True,
) -> Arguments:
    """Return random arguments of `assign_wrt_overlaps`: the overlaps of `truths` true boxes with the boxes of an image.

    thresholds : `pos_iou_thr`, `neg_iou_thr` and `min_pos_iou`
    anchors : arguments of `grid_boxes`, which creates the boxes; None for random proposals
    proposals : number of proposals without `anchors`; half of them are near a truth, the others anywhere
    match_low_quality : passed to `assign_wrt_overlaps`
    """
    gt = draw.boxes(truths)
    if anchors is not None:
        boxes = torch.cat(grid_boxes((800, 1344), **anchors))
    else:
        owners = draw.integers(proposals // 2, high=truths)
        boxes = torch.cat([draw.near(gt[owners], 0.2), draw.boxes(proposals - proposals // 2)])
    return bbox_overlaps(gt, boxes), draw.integers(truths, high=80), *thresholds, True, match_low_quality


@sample(
    inputs,
    {
        "Faster R-CNN R50-FPN, 800x1333, training, second stage": (7, (0.5, 0.5, 0.5), None, 1000, False),
        "RetinaNet R50-FPN, 800x1333, training": (7, (0.5, 0.4, 0.0), {"scales": RETINANET, "ratios": RATIOS}),
        "Faster R-CNN R50-FPN, 800x1333, training, first stage": (
            7,
            (0.7, 0.3, 0.3),
            {"strides": (4, 8, 16, 32, 64), "ratios": RATIOS},
        ),
    },
    tags=(
        "IfElseBranch ForLoop InputAware DataDependentShape AdvancedIndexing InPlace Reduce ViewAttribute "
        "BuiltInDataStructure Customized"
    ),
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/core/bbox/assigners/max_iou_assigner.py#L128",
)
def assign_wrt_overlaps(
    overlaps: Tensor,
    gt_labels: Tensor,
    pos_iou_thr: float,
    neg_iou_thr: float | tuple[float, float],
    min_pos_iou: float = 0.0,
    gt_max_assign_all: bool = True,
    match_low_quality: bool = True,
) -> AssignResult:
    """Assign to each box the truth it overlaps most.

    Parameters
    ----------
    overlaps : (M, N) float, intersection over union of M truths with N boxes; negative for boxes to ignore
    gt_labels : (M,) int64, classes of the truths
    pos_iou_thr : overlap from which a box is assigned to the truth that it overlaps most
    neg_iou_thr : overlap below which a box is background; a pair gives the lower and upper end of a range instead
    min_pos_iou : with `match_low_quality`, least overlap at which a truth is assigned to its best box
    gt_max_assign_all : True to assign a truth to all boxes with its largest overlap, False for only the first of them
    match_low_quality : True to assign each truth also to its best box, even if their overlap is below `pos_iou_thr`

    Source: Ren et al. 2015, section 3.1.2.
    """
    truths, boxes = overlaps.shape
    if truths == 0 or boxes == 0:
        return nothing(boxes, overlaps)
    best, truth = overlaps.max(dim=0)
    gt_best, gt_box = overlaps.max(dim=1)
    gt_inds = overlaps.new_full((boxes,), -1, dtype=torch.long)
    low, high = neg_iou_thr if isinstance(neg_iou_thr, tuple) else (0.0, neg_iou_thr)
    gt_inds[(best >= low) & (best < high)] = 0
    positive = best >= pos_iou_thr
    gt_inds[positive] = truth[positive] + 1
    if match_low_quality:
        # a loop, so that the later of two truths with the same best box gets it
        for index in range(truths):
            if gt_best[index] >= min_pos_iou:
                if gt_max_assign_all:
                    gt_inds[overlaps[index] == gt_best[index]] = index + 1
                else:
                    gt_inds[gt_box[index]] = index + 1
    return AssignResult(gt_inds, best, labels_of(gt_inds, gt_labels))
