from typing import NamedTuple

import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


class SamplingResult(NamedTuple):
    """The boxes of an image that the loss uses.

    Attributes
    ----------
    pos_inds, neg_inds : (P,) and (Q,) int64, ascending indices of the boxes; added truths come first
    pos_priors, neg_priors : (P, 4) and (Q, 4) float: the boxes
    pos_gt_bboxes, pos_gt_labels : (P, 4) float and (P,) int64: truths assigned to the positives
    """

    pos_inds: Tensor
    neg_inds: Tensor
    pos_priors: Tensor
    neg_priors: Tensor
    pos_gt_bboxes: Tensor
    pos_gt_labels: Tensor


def inputs(
    draw: Draw,
    boxes: int,
    positives: int,
    ignored: int,
    num: int,
    pos_fraction: float,
    truths: int = 7,
    add_gt_as_proposals: bool = False,
) -> Arguments:
    order = draw.permutation(boxes)
    gt_inds = torch.zeros(boxes, dtype=torch.long)
    gt_inds[order[:positives]] = draw.integers(positives, low=1, high=truths + 1)
    gt_inds[order[positives : positives + ignored]] = -1
    gt_labels = draw.integers(truths, high=80)
    return gt_inds, draw.boxes(boxes), draw.boxes(truths), gt_labels, num, pos_fraction, -1, add_gt_as_proposals


@sample(
    inputs,
    {
        "Faster R-CNN R50-FPN, 800x1333, training, second stage": (1000, 200, 0, 512, 0.25, 7, True),
        "Faster R-CNN R50-FPN, 800x1333, training, first stage": (268569, 18, 823, 256, 0.5),
    },
    tags="IfElseBranch DataDependentShape AdvancedIndexing ViewAttribute BuiltInDataStructure Customized Random",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/core/bbox/samplers/random_sampler.py#L9",
    random=True,
)
def random_sampler(
    gt_inds: Tensor,
    priors: Tensor,
    gt_bboxes: Tensor,
    gt_labels: Tensor,
    num: int,
    pos_fraction: float,
    neg_pos_ub: int = -1,
    add_gt_as_proposals: bool = True,
) -> SamplingResult:
    """Choose positives and negatives of an assignment at random.

    Parameters
    ----------
    gt_inds : (N,) int64, as in `AssignResult`
    priors : (N, 4) float, x1 y1 x2 y2 in pixels
    gt_bboxes, gt_labels : (M, 4) float and (M,) int64, the truths
    num : number of boxes to choose; negatives fill the places that positives leave free
    pos_fraction : largest share of positives
    neg_pos_ub : most negatives per positive; negative for no limit
    add_gt_as_proposals : True to add the truths as positive boxes

    Source: Ren et al. 2015, section 3.1.3.
    """
    if add_gt_as_proposals and len(gt_bboxes) > 0:
        priors = torch.cat([gt_bboxes, priors])
        gt_inds = torch.cat([torch.arange(1, len(gt_bboxes) + 1, device=gt_inds.device), gt_inds])
    pos_inds = _choose(torch.nonzero(gt_inds > 0).squeeze(1), int(num * pos_fraction))
    negative_count = num - pos_inds.numel()
    if neg_pos_ub >= 0:
        negative_count = min(negative_count, neg_pos_ub * max(1, pos_inds.numel()))
    neg_inds = _choose(torch.nonzero(gt_inds == 0).squeeze(1), negative_count)
    owners = gt_inds[pos_inds] - 1
    return SamplingResult(pos_inds, neg_inds, priors[pos_inds], priors[neg_inds], gt_bboxes[owners], gt_labels[owners])


def _choose(indices: Tensor, count: int) -> Tensor:
    """Return `count` of the indices, chosen at random, in ascending order; all of them if there are not more."""
    if indices.numel() > count:
        # drawn on the CPU, so that every device chooses the same
        indices = indices[torch.randperm(indices.numel())[:count].to(indices.device)]
    return torch.unique(indices)  # type: ignore[no-any-return]
