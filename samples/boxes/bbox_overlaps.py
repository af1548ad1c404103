from typing import Literal

import torch
from torch import Tensor

from opgrip.samples.boxes.box_area import area_between, box_area
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, first: int, second: int, mode: str = "iou", is_aligned: bool = False) -> Arguments:
    """Return `first` and `second` boxes of an image; if aligned, both lists are equally long and boxes of equal index
    are close.

    mode, is_aligned : passed to `bbox_overlaps`
    """
    others = draw.boxes(second)
    boxes = draw.near(others, grad=True) if is_aligned else draw.boxes(first)
    return boxes, others, mode, is_aligned


@sample(
    inputs,
    {
        "Faster R-CNN R50-FPN, 800x1333, training, truths and proposals": (7, 1000),
        "RetinaNet R50-FPN, 800x1333, training, truths and anchors": (7, 201600),
        "DETR R50, 800x1333, training, GIoU of predictions and targets of two images": (200, 200, "giou", True),
    },
    tags="ViewAttribute Broadcast IfElseBranch",
    url="https://github.com/open-mmlab/mmdetection/blob/bde7b4b7eea9dd6ee91a486c6996b2d68662366d/mmdet/core/bbox/iou_calculators/iou2d_calculator.py#L75",
)
def bbox_overlaps(
    bboxes1: Tensor,
    bboxes2: Tensor,
    mode: Literal["iou", "iof", "giou"] = "iou",
    is_aligned: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Return intersection over union, intersection over the first box, or generalized intersection over union.

    Parameters
    ----------
    bboxes1 : (..., M, 4) float, x1 y1 x2 y2 in pixels
    bboxes2 : (..., N, 4) float, likewise
    mode : `iou`, `iof` to divide by the area of the first box, or `giou`
    is_aligned : True to compare boxes in pairs (M equals N), False to compare every box with every other
    eps : lower limit of the divisor, an area

    Returns (..., M) float if aligned, else (..., M, N)
    Source: Everingham et al. 2010, section 4.2; Rezatofighi et al. 2019, algorithm 1.
    """
    if not is_aligned:
        bboxes1, bboxes2 = bboxes1[..., :, None, :], bboxes2[..., None, :, :]
    low = torch.maximum(bboxes1[..., :2], bboxes2[..., :2])
    high = torch.minimum(bboxes1[..., 2:], bboxes2[..., 2:])
    shared = area_between(low, high)
    union = box_area(bboxes1)
    if mode != "iof":
        union = union + box_area(bboxes2) - shared
    union = union.clamp(min=eps)
    overlap = shared / union
    if mode != "giou":
        return overlap
    low = torch.minimum(bboxes1[..., :2], bboxes2[..., :2])
    high = torch.maximum(bboxes1[..., 2:], bboxes2[..., 2:])
    hull = area_between(low, high).clamp(min=eps)
    return overlap - (hull - union) / hull
