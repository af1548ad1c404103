import torch
from torch import Tensor

from opgrip.samples.coders.generate_buckets import generate_buckets
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int, scale_factor: float, num_buckets: int = 14) -> Arguments:
    proposals = draw.boxes(boxes)
    return proposals, draw.near(proposals), num_buckets, scale_factor


@sample(
    inputs,
    {
        "SABL RetinaNet R50-FPN, 800x1333, training, positive anchors": (65, 3.0),
        "SABL Faster R-CNN R50-FPN, 800x1333, training, positives of the second stage": (128, 1.7),
    },
    tags="ForLoop IfElseBranch AdvancedIndexing InPlace Broadcast ViewAttribute BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/core/bbox/coder/bucketing_bbox_coder.py#L145",
    # float32 rounding of a pixel, in buckets one pixel wide
    atol=5e-4,
)
def bbox2bucket(
    proposals: Tensor,
    gt: Tensor,
    num_buckets: int,
    scale_factor: float,
    offset_topk: int = 2,
    offset_upperbound: float = 1.0,
    cls_ignore_neighbor: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the buckets that contain the edges of the truths, and the offsets of the edges from the bucket centres.

    Parameters
    ----------
    proposals, gt : (N, 4) float, x1 y1 x2 y2 in pixels
    num_buckets : number of buckets from one edge to the opposite one
    scale_factor : factor by which proposals are enlarged first
    offset_topk : number of nearest buckets per edge that get an offset target
    offset_upperbound : largest offset, in buckets, of all but the nearest bucket
    cls_ignore_neighbor : True to ignore buckets next to the correct one if less than a bucket away

    Returns
    -------
    offsets, their weights, labels and their weights, each (N, 4 * ceil(num_buckets / 2)) float, for the left, right,
    top and bottom edge; offsets are in buckets, the others 0 or 1

    Source: Wang et al. 2020 (SABL), section 3.2 and 4.1.
    """
    proposals, gt = proposals.float(), gt.float()
    width, height, *sides = generate_buckets(proposals, num_buckets, scale_factor)
    rows = torch.arange(len(proposals), device=proposals.device)
    offsets, offset_weights, labels = [], [], []
    for centres, edge, extent in zip(sides, (0, 2, 1, 3), (width, width, height, height), strict=True):
        offset = (centres - gt[:, edge, None]) / extent[:, None]
        distance, nearest = offset.abs().topk(offset_topk, dim=1, largest=False)
        weight = torch.zeros_like(offset)
        for rank in range(offset_topk):
            if rank == 0:
                weight[rows, nearest[:, rank]] = 1.0
            else:
                weight[rows, nearest[:, rank]] = (distance[:, rank] < offset_upperbound).float()
        offsets.append(offset)
        offset_weights.append(weight)
        labels.append(torch.zeros_like(offset).scatter_(1, nearest[:, :1], 1.0))
    joined, label = torch.cat(offsets, dim=1), torch.cat(labels, dim=1)
    label_weights = torch.ones_like(label)
    if cls_ignore_neighbor:
        label_weights[(joined.abs() < 1) & (label == 0)] = 0.0
    return joined, torch.cat(offset_weights, dim=1), label, label_weights
