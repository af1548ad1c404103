from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, boxes, groups: (draw.boxes(boxes), draw.integers(boxes, high=groups)),
    {
        "RetinaNet R50-FPN, 800x1333, prediction, candidates by class": (4693, 80),
        "Faster R-CNN R50-FPN, 800x1333, prediction, candidates by level": (4819, 5),
    },
    tags="ViewAttribute Broadcast Reduce IfElseBranch",
    url="https://github.com/open-mmlab/mmcv/blob/v2.1.0/mmcv/ops/nms.py",
)
def boxes_for_nms(boxes: Tensor, idxs: Tensor, class_agnostic: bool = False) -> Tensor:
    """Shift the boxes of each group so that non-maximum suppression only acts within groups.

    Parameters
    ----------
    boxes : (N, 4) float, N > 0, x1 y1 x2 y2 in pixels, not negative
    idxs : (N,) int64, group of each box, such as its class or level
    class_agnostic : True to return the boxes unchanged, so that all groups suppress each other

    Returns (N, 4) float, each group shifted beyond the largest coordinate of the previous one
    Source: MMCV, `ops.nms.batched_nms`.
    """
    if class_agnostic:
        return boxes
    offsets = idxs.to(boxes) * (boxes.max() + 1)
    return boxes + offsets[:, None]
