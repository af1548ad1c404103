import torch
from torch import Tensor

from opgrip.samples.coders.bbox2delta import inputs
from opgrip.samples.sample import sample


@sample(
    inputs,
    {
        "Faster R-CNN R50-FPN, 800x1333, training, positives of the second stage": (128,),
        "sizes of LongTail-Bench": (3000,),
    },
    tags="IfElseBranch ViewAttribute BuiltInDataStructure",
    url="https://github.com/ModelTC/United-Perception/blob/2f5c8bc8549cc16810d093050fe6d0aa5b902629/up/tasks/det/models/utils/bbox_helper.py",
)
def bbox2offset(
    boxes: Tensor, gt_boxes: Tensor, weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
) -> Tensor:
    """Return weighted offsets that turn boxes into their truths; the inverse of `offset2bbox`.

    Parameters
    ----------
    boxes, gt_boxes : (N, 4) float, x1 y1 x2 y2 in pixels, where x2 and y2 belong to the box
    weights : factors of dx dy dw dh

    Returns (N, 4) float: dx dy relative to the size of the box, dw dh as logarithms
    Source: United Perception, the successor of the POD that LongTail-Bench names; Detectron has the same function.
    """
    if boxes.numel() == 0 or gt_boxes.numel() == 0:
        return boxes.new_zeros(0, 4)
    x, y, width, height = centre_and_size(boxes)
    gt_x, gt_y, gt_width, gt_height = centre_and_size(gt_boxes)
    weight_x, weight_y, weight_w, weight_h = weights
    offsets = (
        weight_x * (gt_x - x) / width,
        weight_y * (gt_y - y) / height,
        weight_w * (gt_width / width).log(),
        weight_h * (gt_height / height).log(),
    )
    return torch.stack(offsets, dim=1)


def centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x and y of the centre, width and height of boxes (N, 4), each (N,) float, in pixels.

    The pixels of x2 and y2 belong to the box: its width is x2 - x1 + 1.
    """
    x1, y1, x2, y2 = boxes.unbind(dim=1)
    width, height = x2 - x1 + 1, y2 - y1 + 1
    return x1 + width / 2, y1 + height / 2, width, height
