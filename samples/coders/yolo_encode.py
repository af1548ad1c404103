import torch
from torch import Tensor

from opgrip.samples.coders.yolo_decode import ANCHORS
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int, side: int = 608) -> Arguments:
    strides, extents = zip(*((stride, extent) for stride in ANCHORS for extent in ANCHORS[stride]), strict=True)
    chosen = draw.integers(boxes, high=len(strides))
    stride, half = torch.tensor(strides)[chosen], torch.tensor(extents)[chosen] / 2
    truths = draw.boxes(boxes, (side, side))
    cell = (truths[:, :2] + truths[:, 2:]) / 2 // stride[:, None]
    centre = (cell + 0.5) * stride[:, None]
    return torch.cat([centre - half, centre + half], dim=1), truths, stride


@sample(
    inputs,
    {
        "YOLOv3 DarkNet-53, 608x608, training, 7 objects": (7,),
        "YOLOv3 DarkNet-53, 608x608, training, 100 objects": (100,),
    },
    tags="ViewAttribute BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmdetection/blob/v3.3.0/mmdet/models/task_modules/coders/yolo_bbox_coder.py",
)
def yolo_encode(bboxes: Tensor, gt_bboxes: Tensor, stride: Tensor | int, eps: float = 1e-6) -> Tensor:
    """Return the regression targets that turn anchors into the truths in their cells.

    Parameters
    ----------
    bboxes, gt_bboxes : (..., 4) float, x1 y1 x2 y2 in pixels
    stride : (...,) int or float, or a number: size of a cell in pixels
    eps : least distance of a centre from the cell's edges, and the least ratio of sizes

    Returns (..., 4) float: position of the centre in its cell, 0 to 1, and logarithms of the box's scale
    Source: Redmon and Farhadi 2018 (YOLOv3), section 2.1.
    """
    x, y, width, height = _centre_and_size(bboxes)
    gt_x, gt_y, gt_width, gt_height = _centre_and_size(gt_bboxes)
    targets = [
        ((gt_x - x) / stride + 0.5).clamp(eps, 1 - eps),
        ((gt_y - y) / stride + 0.5).clamp(eps, 1 - eps),
        (gt_width / width).clamp(min=eps).log(),
        (gt_height / height).clamp(min=eps).log(),
    ]
    return torch.stack(targets, dim=-1)


def _centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x1, y1, x2, y2 = boxes.unbind(dim=-1)
    return (x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1
