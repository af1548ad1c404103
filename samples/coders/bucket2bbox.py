import torch
from torch import Tensor

from opgrip.samples.coders.generate_buckets import generate_buckets
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int, scale_factor: float, num_buckets: int = 14) -> Arguments:
    """Return boxes, random scores of their buckets, and random offsets, most of them below half a bucket.

    boxes : number of boxes
    scale_factor, num_buckets : passed to `bucket2bbox`
    """
    outputs = 4 * ((num_buckets + 1) // 2)
    scores, offsets = draw.normal(boxes, outputs), draw.normal(boxes, outputs, std=0.3)
    return draw.boxes(boxes), scores, offsets, num_buckets, scale_factor, (800, 1333)


@sample(
    inputs,
    {
        "SABL Faster R-CNN R50-FPN, 800x1333, inference, second stage": (1000, 1.7),
        "SABL RetinaNet R50-FPN, 800x1333, inference, a level's best anchors": (1000, 3.0),
    },
    tags="ForLoop IfElseBranch AdvancedIndexing Reduce Broadcast ViewAttribute BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmdetection/blob/1a90fa80a761fe15e69111a625d82874ed783f7b/mmdet/core/bbox/coder/bucketing_bbox_coder.py#L269",
)
def bucket2bbox(
    proposals: Tensor,
    cls_preds: Tensor,
    offset_preds: Tensor,
    num_buckets: int,
    scale_factor: float = 1.0,
    max_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return boxes with edges at the most probable buckets, shifted by the offsets predicted there.

    Parameters
    ----------
    proposals : (N, 4) float, x1 y1 x2 y2 in pixels
    cls_preds : (N, 4 * ceil(num_buckets / 2)) float: logits of the buckets of the left, right, top and bottom edge
    offset_preds : likewise, in buckets
    num_buckets : number of buckets from one edge to the opposite one
    scale_factor : factor by which proposals are enlarged first
    max_shape : height and width of the image in pixels; boxes are clipped to its last pixels. None does not clip

    Returns
    -------
    boxes, (N, 4) float, x1 y1 x2 y2 in pixels; their confidence, (N,) float, 0 to 1: mean over edges of the score of
    the best bucket, plus that of the second-best if it is a neighbour

    Source: Wang et al. 2020 (SABL), sections 3.2 and 3.3.
    """
    width, height, *sides = generate_buckets(proposals, num_buckets, scale_factor)
    buckets = sides[0].shape[1]
    scores, labels = cls_preds.view(-1, buckets).softmax(dim=1).topk(2, dim=1)
    chosen = labels[:, 0].view(-1, 4)
    offsets = offset_preds.view(-1, 4, buckets)
    rows = torch.arange(len(proposals), device=proposals.device)
    left, right, top, bottom = (
        side[rows, chosen[:, edge]] - offsets[:, edge][rows, chosen[:, edge]] * extent
        for edge, (side, extent) in enumerate(zip(sides, (width, width, height, height), strict=True))
    )
    if max_shape is not None:
        left, right = left.clamp(0, max_shape[1] - 1), right.clamp(0, max_shape[1] - 1)
        top, bottom = top.clamp(0, max_shape[0] - 1), bottom.clamp(0, max_shape[0] - 1)
    neighbours = (labels[:, 0] - labels[:, 1]).abs() == 1
    sureness = scores[:, 0] + scores[:, 1] * neighbours.float()
    return torch.stack([left, top, right, bottom], dim=1), sureness.view(-1, 4).mean(dim=1)
