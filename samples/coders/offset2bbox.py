from math import log

from torch import Tensor

from opgrip.samples.coders.bbox2offset import centre_and_size
from opgrip.samples.sample import sample


@sample(
    lambda draw, boxes, classes=1: (draw.boxes(boxes), draw.normal(boxes, 4 * classes, std=0.1)),
    {
        "Faster R-CNN R50-FPN, 800x1333, inference, a level's best anchors": (1000,),
        "sizes of LongTail-Bench": (4000,),
        "Faster R-CNN R50-FPN, 800x1333, inference, second stage": (1000, 81),
    },
    tags="IfElseBranch ViewAttribute Broadcast InPlace ForLoop",
    url="https://github.com/ModelTC/United-Perception/blob/2f5c8bc8549cc16810d093050fe6d0aa5b902629/up/tasks/det/models/utils/bbox_helper.py",
)
def offset2bbox(
    boxes: Tensor, offset: Tensor, weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
) -> Tensor:
    """Return the boxes that result from applying offsets to others; the inverse of `bbox2offset`.

    Parameters
    ----------
    boxes : (N, 4) float, x1 y1 x2 y2 in pixels, where x2 and y2 belong to the box
    offset : (N, 4 * C) float: per class, dx dy relative to the size of the box, dw dh as logarithms
    weights : factors that dx dy dw dh were multiplied by

    Returns (N, 4 * C) float, x1 y1 x2 y2 in pixels, at most 62.5 times the size of `boxes`
    Source: United Perception, the successor of the POD that LongTail-Bench names; Detectron has the same function.
    """
    if boxes.numel() == 0 or offset.numel() == 0:
        return boxes.new_zeros(0, 4)
    x, y, width, height = centre_and_size(boxes)
    moved = offset.new_zeros(offset.shape)
    for axis, (centre, extent) in enumerate([(x, width), (y, height)]):
        shift = offset[:, axis::4] / weights[axis]
        growth = (offset[:, axis + 2 :: 4] / weights[axis + 2]).clamp(max=log(1000 / 16))
        middle = shift * extent[:, None] + centre[:, None]
        half = growth.exp() * extent[:, None] / 2
        moved[:, axis::4] = middle - half
        moved[:, axis + 2 :: 4] = middle + half - 1
    return moved
