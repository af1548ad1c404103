from math import log

import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw,
    boxes: int,
    classes: int = 1,
    stds: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    size: tuple[int, int] | None = (800, 1333),
    grad: bool = False,
) -> Arguments:
    """Return boxes, deltas of about a tenth of their size, and the normalization of the deltas.

    Parameters
    ----------
    boxes, classes : number of boxes, and of classes for which each box has deltas
    stds : passed to `delta2bbox`
    size : height and width in pixels of the image that boxes are clipped to; None does not clip
    grad : True if the deltas require a gradient
    """
    deltas = draw.normal(boxes, 4 * classes) * 0.1 / torch.tensor(stds * classes)
    return draw.boxes(boxes), deltas.requires_grad_(grad), (0.0, 0.0, 0.0, 0.0), stds, size


@sample(
    inputs,
    {
        "ATSS R50-FPN, 800x1333, training, positive anchors": (49, 1, (0.1, 0.1, 0.2, 0.2), None, True),
        "Faster R-CNN R50-FPN, 800x1333, inference, best anchors of all levels": (4819,),
        "Faster R-CNN R50-FPN, 800x1333, inference, second stage": (1000, 80, (0.1, 0.1, 0.2, 0.2)),
    },
    tags="IfElseBranch ViewAttribute Broadcast InPlace",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/core/bbox/coder/delta_xywh_bbox_coder.py#L164",
)
def delta2bbox(
    rois: Tensor,
    deltas: Tensor,
    means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    stds: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    max_shape: tuple[int, int] | None = None,
    wh_ratio_clip: float = 16 / 1000,
    ctr_clamp: float | None = None,
) -> Tensor:
    """Return the boxes that result from applying deltas to proposals; the inverse of `bbox2delta`.

    Parameters
    ----------
    rois : (N, 4) float, x1 y1 x2 y2 in pixels
    deltas : (N, 4 * C) float: per class, dx dy relative to the size of the proposal, dw dh as logarithms
    means, stds : means and standard deviations that the deltas were normalized by
    max_shape : height and width in pixels of the image that boxes are clipped to; None does not clip
    wh_ratio_clip : limits the scale of boxes to between wh_ratio_clip and 1 / wh_ratio_clip
    ctr_clamp : largest shift of a centre in pixels; boxes may then shrink without limit, as in YOLOF

    Returns (N, 4 * C) float, x1 y1 x2 y2 in pixels
    Source: Girshick et al. 2014, appendix C; the last option: Chen et al. 2021 (YOLOF).
    """
    if len(deltas) == 0:
        return deltas
    classes = deltas.shape[1] // 4
    moves = deltas.reshape(-1, 4) * deltas.new_tensor(stds) + deltas.new_tensor(means)
    repeated = rois.repeat(1, classes).reshape(-1, 4)
    extent = repeated[:, 2:] - repeated[:, :2]
    shift, growth = moves[:, :2] * extent, moves[:, 2:]
    limit = -log(wh_ratio_clip)
    if ctr_clamp is None:
        growth = growth.clamp(-limit, limit)
    else:
        shift, growth = shift.clamp(-ctr_clamp, ctr_clamp), growth.clamp(max=limit)
    centre = (repeated[:, :2] + repeated[:, 2:]) / 2 + shift
    half = extent * growth.exp() / 2
    boxes = torch.cat([centre - half, centre + half], dim=1)
    if max_shape is not None:
        boxes[:, 0::2].clamp_(0, max_shape[1])
        boxes[:, 1::2].clamp_(0, max_shape[0])
    return boxes.reshape(len(rois), -1)
