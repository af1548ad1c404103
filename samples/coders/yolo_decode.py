import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample

ANCHORS = {
    32: [(116, 90), (156, 198), (373, 326)],
    16: [(30, 61), (62, 45), (59, 119)],
    8: [(10, 13), (16, 30), (33, 23)],
}
"""Anchors of YOLOv3: width and height in pixels, by stride."""


def inputs(draw: Draw, side: int, batch: int = 1) -> Arguments:
    anchors, strides = [], []
    for stride, extents in ANCHORS.items():
        cells = torch.arange(side // stride) * float(stride) + stride / 2
        y, x = torch.meshgrid(cells, cells, indexing="ij")
        centre = torch.stack([x, y], dim=2).reshape(-1, 1, 2)
        half = torch.tensor(extents) / 2
        anchors.append(torch.cat([centre - half, centre + half], dim=2).reshape(-1, 4))
        strides.append(torch.full((len(anchors[-1]), 1), stride))
    count = sum(map(len, anchors))
    predictions = torch.cat([draw.uniform(batch, count, 2), draw.normal(batch, count, 2, std=0.3)], dim=2)
    return torch.cat(anchors), predictions, torch.cat(strides)


@sample(
    inputs,
    {
        "YOLOv3 DarkNet-53, 320x320, inference": (320,),
        "YOLOv3 DarkNet-53, 608x608, inference": (608,),
        "YOLOv3 DarkNet-53, 608x608, inference, batch of 8": (608, 8),
    },
    tags="ViewAttribute Broadcast",
    url="https://github.com/open-mmlab/mmdetection/blob/v3.3.0/mmdet/models/task_modules/coders/yolo_bbox_coder.py",
)
def yolo_decode(bboxes: Tensor, pred_bboxes: Tensor, stride: Tensor | int) -> Tensor:
    """Return the boxes that result from applying predictions to anchors; the inverse of `yolo_encode`.

    Parameters
    ----------
    bboxes : (N, 4) float, x1 y1 x2 y2 of the anchors in pixels
    pred_bboxes : (..., N, 4) float: position of the centre in its cell, 0 to 1, and logarithms of the box's scale
    stride : (N, 1) int or float, or a number: size of a cell in pixels

    Returns (..., N, 4) float, x1 y1 x2 y2 in pixels
    Source: Redmon and Farhadi 2018 (YOLOv3), section 2.1.
    """
    centre = (bboxes[..., :2] + bboxes[..., 2:]) / 2 + (pred_bboxes[..., :2] - 0.5) * stride
    half = (bboxes[..., 2:] - bboxes[..., :2]) / 2 * pred_bboxes[..., 2:].exp()
    x, y, half_width, half_height = centre[..., 0], centre[..., 1], half[..., 0], half[..., 1]
    return torch.stack((x - half_width, y - half_height, x + half_width, y + half_height), dim=-1)
