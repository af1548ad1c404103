from typing import Any

import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample

EPS = 1e-5
RATIOS = (1.05, 21.0)
"""Limits of the ratio of the number of all scores to that of positive ones, from which weights are computed."""


def inputs(draw: Draw, videos: int, length: int) -> Arguments:
    steps = torch.arange(length)
    mask = (steps[:, None] + steps < length).float()
    # few segments overlap an action well
    overlaps = draw.uniform(videos, length, length) ** 4
    return (
        draw.uniform(videos, 2, length, length, low=0.01, high=0.99, grad=True),
        draw.uniform(videos, length, low=0.01, high=0.99, grad=True),
        draw.uniform(videos, length, low=0.01, high=0.99, grad=True),
        overlaps,
        draw.uniform(videos, length) ** 4,
        draw.uniform(videos, length) ** 4,
        mask,
    )


@sample(
    inputs,
    {
        "BMN, ActivityNet, 100 steps, training, one video": (1, 100),
        "BMN, ActivityNet, 100 steps, training, 8 videos": (8, 100),
    },
    tags="ForLoop IfElseBranch InputAware Reduce Broadcast ViewAttribute BuiltInDataStructure Random",
    url="https://github.com/open-mmlab/mmaction2/blob/d5ab34805fe6a02bb98e4af158626a21790b6974/mmaction/models/losses/bmn_loss.py#L11",
    random=True,
)
def bmn_loss(
    pred_bm: Tensor,
    pred_start: Tensor,
    pred_end: Tensor,
    gt_iou_map: Tensor,
    gt_start: Tensor,
    gt_end: Tensor,
    bm_mask: Tensor,
    weight_tem: float = 1.0,
    weight_pem_reg: float = 10.0,
    weight_pem_cls: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the boundary-matching loss and its three parts.

    Parameters
    ----------
    pred_bm : (B, 2, D, T) float, scores of segments by duration and start, for regression of the overlap and
    classification
    pred_start, pred_end : (B, T) float, scores of each position in time as start and as end of an action
    gt_iou_map : (B, D, T) float, overlap of each segment with an action
    gt_start, gt_end : (B, T) float, overlap of each position in time with the start and with the end of an action
    bm_mask : (D, T) float, 1 for the segments that end within the video
    weight_tem, weight_pem_reg, weight_pem_cls : weights of the parts

    Returns loss, boundaries, regression, classification : () float each
    Source: Lin et al. 2019, with the constants of MMAction2.
    """
    overlaps = gt_iou_map * bm_mask
    regression = _regression_loss(pred_bm[:, 0].contiguous(), overlaps, bm_mask)

    fits = (overlaps > 0.9).float()
    others = (overlaps <= 0.9).float() * bm_mask
    counted = _count(fits) + others.sum()
    classification = _balanced_log_loss(pred_bm[:, 1].contiguous(), fits, others, counted)

    boundaries = _boundary_loss(pred_start, gt_start) + _boundary_loss(pred_end, gt_end)
    loss = weight_tem * boundaries + weight_pem_reg * regression + weight_pem_cls * classification
    return loss, boundaries, regression, classification


def _boundary_loss(scores: Tensor, truth: Tensor) -> Tensor:
    """Return the binary cross entropy of the scores of all positions in time of all videos, with balanced weights.

    scores : (B, T) float, probability that an action starts, or ends, at each position
    truth : (B, T) float, overlap with the start or end of an action; above 0.5 counts as positive
    """
    truth = truth.view(-1)
    there = (truth > 0.5).float()
    return _balanced_log_loss(scores.contiguous().view(-1), there, 1.0 - there, len(truth))


def _balanced_log_loss(scores: Tensor, positive: Tensor, negative: Tensor, counted: Tensor | int) -> Tensor:
    """Return the binary cross entropy, with equal total weights of positive and negative elements.

    Parameters
    ----------
    scores : probabilities, of any shape
    positive, negative : masks of 0 and 1 of the same shape
    counted : number of elements, by which the sum is divided
    """
    ratio: Any = counted / _count(positive)
    ratio = min(max(ratio, RATIOS[0]), RATIOS[1])
    gained = 0.5 * ratio * (scores + EPS).log() * positive
    avoided = 0.5 * ratio / (ratio - 1) * (1.0 - scores + EPS).log() * negative
    loss: Tensor = -(gained + avoided).sum() / counted
    return loss


def _count(mask: Tensor) -> Tensor | int:
    """Return the number of ones in a mask, at least 1."""
    count = mask.sum()
    return count if count > 1 else 1


def _regression_loss(scores: Tensor, overlaps: Tensor, mask: Tensor, high: float = 0.7, low: float = 0.3) -> Tensor:
    """Return half of the mean squared error of the scores of chosen segments.

    All segments whose overlap with an action exceeds `high` are chosen, at random about as many with an overlap between
    `low` and `high`, and about as many with a smaller overlap above 0.

    Parameters
    ----------
    scores, overlaps : (B, D, T) float, predicted and true overlap of segments by duration and start
    mask : (D, T) float, 1 for the segments that end within the video
    """
    well = (overlaps > high).float()
    half = ((overlaps <= high) & (overlaps > low)).float()
    hardly = ((overlaps <= low) & (overlaps > 0.0)).float() * mask
    chosen = well
    for kind in (half, hardly):
        share = well.sum() / kind.sum()
        chosen = chosen + (kind * torch.rand_like(overlaps) > 1.0 - share).float()
    error = scores * chosen - overlaps * chosen
    return 0.5 * (error * error).sum() / chosen.sum()
