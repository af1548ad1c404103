import torch
import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, masks: int, size: tuple[int, int], points: int = 12544, given: bool = False) -> Arguments:
    truths = torch.zeros(masks, *size)
    for truth, (left, top, right, bottom) in zip(truths, draw.boxes(masks, size).long().tolist(), strict=True):
        truth[top:bottom, left:right] = 1
    noise = draw.normal(masks, size[0] // 4, size[1] // 4, std=2.0)
    scores = (8 * truths[:, 2::4, 2::4] - 4 + noise).requires_grad_()
    return scores, truths, float(masks), draw.uniform(masks, points, 2) if given else None, points


@sample(
    inputs,
    {
        "Mask2Former R50, COCO, 256x256, training, 2 masks, 1000 points": (2, (256, 256), 1000),
        "Mask2Former R50, COCO, 1024x1024, training, 8 masks": (8, (1024, 1024)),
        "Mask2Former R50, Cityscapes, 512x1024, training, 20 masks at given points": (20, (512, 1024), 12544, True),
    },
    tags="IfElseBranch ViewAttribute AdvancedIndexing InPlace Reduce Broadcast Random",
    project="Transformers",
    url="https://arxiv.org/abs/2112.01527",
    random=True,
)
def mask_point_loss(
    mask_preds: Tensor,
    mask_targets: Tensor,
    num_masks: float,
    points: Tensor | None = None,
    num_points: int = 12544,
    oversample_ratio: float = 3.0,
    importance_sample_ratio: float = 0.75,
) -> tuple[Tensor, Tensor]:
    """Return binary cross entropy and Dice loss of masks at points.

    Parameters
    ----------
    mask_preds : (M, h, w) float, scores
    mask_targets : (M, H, W) of any dtype, 1 and 0
    num_masks : divisor of the sums over masks
    points : (M, P, 2) float, x y relative to the width and height; None draws them
    num_points : number of points per mask
    oversample_ratio : factor of `num_points` drawn first, of which the least certain are kept
    importance_sample_ratio : share of the points chosen that way; the others are drawn anywhere

    Returns two () float: cross entropy and Dice loss
    Source: Cheng et al. 2022, "Mask2Former", section 3.3, as in Transformers; points of Kirillov et al. 2020,
    "PointRend", section 4.1.
    """
    preds, targets = mask_preds.unsqueeze(1), mask_targets.unsqueeze(1).float()
    with torch.no_grad():
        if points is None:
            points = _unsure_points(preds, num_points, oversample_ratio, importance_sample_ratio)
        truth = _at_points(targets, points)
    scores = _at_points(preds, points)
    cross_entropy = F.binary_cross_entropy_with_logits(scores, truth, reduction="none").mean(dim=1)
    probability = scores.sigmoid()
    overlap = 2 * (probability * truth).sum(dim=-1)
    dice = 1 - (overlap + 1) / (probability.sum(dim=-1) + truth.sum(dim=-1) + 1)
    return cross_entropy.sum() / num_masks, dice.sum() / num_masks


def _at_points(maps: Tensor, points: Tensor) -> Tensor:
    """Return the values of maps (M, 1, H, W) at points (M, P, 2), interpolated bilinearly, (M, P) float.

    points : x y relative to the width and height of the map
    """
    grid = 2 * points.unsqueeze(2) - 1
    return F.grid_sample(maps, grid, align_corners=False).squeeze(3).squeeze(1)


def _unsure_points(preds: Tensor, count: int, oversample_ratio: float, share: float) -> Tensor:
    masks = len(preds)
    drawn = int(count * oversample_ratio)
    points = torch.rand(masks, drawn, 2, device=preds.device)
    unsure = int(share * count)
    # uncertainty is that of the interpolated score: between scores of 1 and -1 there is a point of 0
    indices = (-_at_points(preds, points).abs()).topk(unsure, dim=1).indices
    indices += drawn * torch.arange(masks, device=preds.device)[:, None]
    chosen = points.view(-1, 2)[indices.view(-1)].view(masks, unsure, 2)
    if unsure < count:
        chosen = torch.cat([chosen, torch.rand(masks, count - unsure, 2, device=preds.device)], dim=1)
    return chosen
