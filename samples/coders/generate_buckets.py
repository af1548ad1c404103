import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, boxes, scale_factor, num_buckets=14: (draw.boxes(boxes), num_buckets, scale_factor),
    {
        "SABL Faster R-CNN R50-FPN, 800x1333, training, positives of the second stage": (128, 1.7),
        "SABL Faster R-CNN R50-FPN, 800x1333, inference, second stage": (1000, 1.7),
    },
    tags="ViewAttribute Broadcast BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmdetection/blob/1a90fa80a761fe15e69111a625d82874ed783f7b/mmdet/core/bbox/coder/bucketing_bbox_coder.py#L96",
)
def generate_buckets(
    proposals: Tensor, num_buckets: int, scale_factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the centres of the buckets that divide proposals, counted from each edge to the middle.

    Parameters
    ----------
    proposals : (N, 4) float, x1 y1 x2 y2 in pixels
    num_buckets : number of buckets from one edge to the opposite one
    scale_factor : factor by which proposals are enlarged about their centre first

    Returns
    -------
    width and height of a bucket, (N,) float, in pixels; then the centres of the buckets of the left, right,
    top and bottom edge, each (N, ceil(num_buckets / 2)) float, in pixels

    Source: Wang et al. 2020 (SABL), section 3.2.
    """
    centre = (proposals[:, :2] + proposals[:, 2:]) / 2
    extent = (proposals[:, 2:] - proposals[:, :2]) * scale_factor
    left, top = (centre - extent / 2).unbind(dim=1)
    right, bottom = (centre + extent / 2).unbind(dim=1)
    width, height = (extent / num_buckets).unbind(dim=1)
    middles = torch.arange((num_buckets + 1) // 2).to(proposals)[None, :] + 0.5
    across, down = middles * width[:, None], middles * height[:, None]
    return (
        width,
        height,
        left[:, None] + across,
        right[:, None] - across,
        top[:, None] + down,
        bottom[:, None] - down,
    )
