import torch
from torch import Tensor

from opgrip.samples.boxes.box_area import area_between
from opgrip.samples.boxes.box_iou import CONFIGURATIONS, box_iou, inputs
from opgrip.samples.sample import sample


@sample(
    inputs,
    CONFIGURATIONS,
    tags="ViewAttribute Broadcast Reduce InputAware IfElseBranch",
    url="https://github.com/facebookresearch/detr/blob/eb9f7e03ed8e2ed2cd55528989fe7df890bc3fc0/util/box_ops.py#L40",
)
def generalized_box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the generalized intersection over union of every box with every other.

    Parameters
    ----------
    first : (..., N, 4) float, x1 y1 x2 y2
    second : (..., M, 4) float, likewise

    Returns (..., N, M) float, -1 to 1: intersection over union minus the empty share of the smallest box around both

    Raises
    ------
    ValueError : if a box has x2 < x1 or y2 < y1

    Source: Rezatofighi et al. 2019, algorithm 1; DETR's `util/box_ops.py`.
    """
    if not (first[..., 2:] >= first[..., :2]).all() or not (second[..., 2:] >= second[..., :2]).all():
        raise ValueError("a box has x2 < x1 or y2 < y1: expected x1 y1 x2 y2")
    overlap, union = box_iou(first, second)
    first, second = first[..., :, None, :], second[..., None, :, :]
    low = torch.minimum(first[..., :2], second[..., :2])
    high = torch.maximum(first[..., 2:], second[..., 2:])
    hull = area_between(low, high)
    return overlap - (hull - union) / hull
