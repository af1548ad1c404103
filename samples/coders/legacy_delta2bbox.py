from math import log

import torch
from torch import Tensor

from opgrip.samples.coders.delta2bbox import inputs
from opgrip.samples.sample import sample


@sample(
    inputs,
    {
        "RetinaNet R50-FPN v1, 800x1333, inference, a level's best anchors": (1000,),
        "Faster R-CNN R50-FPN v1, 800x1333, inference, second stage": (1000, 80, (0.1, 0.1, 0.2, 0.2)),
    },
    tags="ForLoop IfElseBranch ViewAttribute Broadcast BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmdetection/blob/bde7b4b7eea9dd6ee91a486c6996b2d68662366d/mmdet/core/bbox/coder/legacy_delta_xywh_bbox_coder.py#L134",
)
def legacy_delta2bbox(
    rois: Tensor,
    deltas: Tensor,
    means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    stds: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    max_shape: tuple[int, int] | None = None,
    wh_ratio_clip: float = 16 / 1000,
) -> Tensor:
    """Return the boxes that result from applying deltas to proposals of size x2 - x1 + 1 and y2 - y1 + 1.

    Parameters
    ----------
    rois : (N, 4) float, x1 y1 x2 y2 in pixels, where x2 and y2 belong to the box
    deltas : (N, 4 * C) float: per class, dx dy relative to the size of the proposal, dw dh as logarithms
    means, stds : means and standard deviations that the deltas were normalized by
    max_shape : height and width of the image in pixels; boxes are clipped to its last pixels. None does not clip
    wh_ratio_clip : limits the scale of boxes to between wh_ratio_clip and 1 / wh_ratio_clip

    Returns
    -------
    (N, 4 * C) float, x1 y1 x2 y2; the corners are a full size apart: the pixel is not subtracted again, which improved
    the boxes of MMDetection's older models

    Source: Girshick et al. 2014, appendix C, as in MMDetection 1.
    """
    classes = deltas.shape[1] // 4
    moves = deltas * deltas.new_tensor(stds).repeat(classes) + deltas.new_tensor(means).repeat(classes)
    limit = -log(wh_ratio_clip)
    low, high = [], []
    # x first, then y: each is a column of the proposals and every fourth one of the deltas
    for axis in (0, 1):
        shift, growth = moves[:, axis::4], moves[:, axis + 2 :: 4].clamp(-limit, limit)
        centre = ((rois[:, axis] + rois[:, axis + 2]) / 2)[:, None].expand_as(shift)
        extent = (rois[:, axis + 2] - rois[:, axis] + 1)[:, None].expand_as(shift)
        moved, half = centre + extent * shift, extent * growth.exp() / 2
        low.append(moved - half)
        high.append(moved + half)
    if max_shape is not None:
        last = max_shape[1] - 1, max_shape[0] - 1
        low = [edge.clamp(0, end) for edge, end in zip(low, last, strict=True)]
        high = [edge.clamp(0, end) for edge, end in zip(high, last, strict=True)]
    return torch.stack(low + high, dim=-1).view_as(deltas)
