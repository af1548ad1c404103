from torch import Tensor

from opgrip.samples.sample import Draw, sample


def inputs(draw: Draw, boxes: int, groups: int) -> tuple[Tensor, Tensor]:
    """Boxes of an image, and their groups."""
    return draw.boxes(boxes), draw.integers(boxes, high=groups)


@sample(
    inputs,
    {
        "RetinaNet R50-FPN, 800x1333, prediction, candidates by class": (4693, 80),
        "Faster R-CNN R50-FPN, 800x1333, prediction, candidates by level": (4819, 5),
    },
    tags="ViewAttribute Broadcast Reduce IfElseBranch",
    project="MMCV",
    url="https://github.com/open-mmlab/mmcv/blob/v2.1.0/mmcv/ops/nms.py",
)
def boxes_for_nms(boxes: Tensor, idxs: Tensor, class_agnostic: bool = False) -> Tensor:
    """Boxes that only others of their group can suppress.

    Parameters
    ----------
    boxes : (N, 4) float, N > 0, x1 y1 x2 y2 in pixels, none negative
    idxs : (N,) int64, the group of each: its class, say, or level
    class_agnostic : boxes of all groups suppress each other, so leave them

    Returns (N, 4) float, each group beyond the largest coordinate of the one before
    Source: MMCV, `ops.nms.batched_nms`.
    """
    if class_agnostic:
        return boxes
    offsets = idxs.to(boxes) * (boxes.max() + 1)
    return boxes + offsets[:, None]
