import torch
from torch import Tensor

from opgrip.samples.assigners.assign_result import AssignResult, labels_of, nothing
from opgrip.samples.assigners.candidates import settle
from opgrip.samples.assigners.priors import grid_boxes
from opgrip.samples.boxes.bbox_overlaps import bbox_overlaps
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, truths: int, size: tuple[int, int] = (800, 1344), classes: int = 80) -> Arguments:
    priors = torch.cat(grid_boxes(size))
    scores = draw.normal(len(priors), classes, mean=-4.0).sigmoid()
    gt = draw.boxes(truths, (float(size[0]), float(size[1])))
    return priors, draw.near(priors, 0.2), scores, gt, draw.integers(truths, high=classes)


@sample(
    inputs,
    {
        "TOOD R50-FPN, 800x1333, training, 2 objects": (2,),
        "TOOD R50-FPN, 800x1333, training, 7 objects": (7,),
    },
    tags=(
        "IfElseBranch DataDependentShape AdvancedIndexing InPlace Reduce Broadcast ViewAttribute "
        "BuiltInDataStructure Customized"
    ),
    url="https://github.com/open-mmlab/mmdetection/blob/v3.3.0/mmdet/models/task_modules/assigners/task_aligned_assigner.py",
)
def task_aligned_assign(
    priors: Tensor,
    pred_bboxes: Tensor,
    pred_scores: Tensor,
    gt_bboxes: Tensor,
    gt_labels: Tensor,
    topk: int = 13,
    alpha: float = 1,
    beta: float = 6,
) -> tuple[AssignResult, Tensor]:
    """Assign to each truth the anchors with the best product of class score and overlap.

    Parameters
    ----------
    priors, pred_bboxes : (N, 4) float, x1 y1 x2 y2 in pixels
    pred_scores : (N, C) float, 0 to 1
    gt_bboxes, gt_labels : (M, 4) float and (M,) int64, the truths
    topk : number of candidate anchors per truth
    alpha, beta : exponents of score and overlap in their product, the alignment

    Returns
    -------
    the assignment, with a `max_overlaps` of -1e8 for unassigned anchors; and the alignments with the assigned truths,
    (N,) float, 0 for unassigned anchors

    Source: Feng et al. 2021 (TOOD), section 3.2.
    """
    alignments = priors.new_zeros(len(priors))
    if len(gt_bboxes) == 0 or len(priors) == 0:
        return nothing(len(priors), priors), alignments
    overlaps = bbox_overlaps(pred_bboxes, gt_bboxes).detach()
    metrics = pred_scores[:, gt_labels].detach() ** alpha * overlaps**beta
    best, candidates = metrics.topk(min(topk, len(metrics)), dim=0)
    gt_inds, max_overlaps = settle(candidates, best > 0, overlaps, priors, gt_bboxes)
    is_assigned = gt_inds > 0
    alignments[is_assigned] = metrics[is_assigned, gt_inds[is_assigned] - 1]
    return AssignResult(gt_inds, max_overlaps, labels_of(gt_inds, gt_labels)), alignments
