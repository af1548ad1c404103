import torch
from torch import Tensor

from opgrip.samples.boxes.bbox_overlaps import bbox_overlaps
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, objects: int, boxes: int, threshold: float) -> Arguments:
    truths = draw.boxes(objects)
    return draw.near(truths[draw.integers(boxes, high=objects)]), draw.uniform(boxes), threshold


@sample(
    inputs,
    {
        "built-in Faster R-CNN, 256x256, prediction, candidates of a level": (6, 60, 0.7),
        "Faster R-CNN R50-FPN, 800x1333, prediction, candidates of a level": (60, 1000, 0.7),
    },
    tags=(
        "ForLoop InputAware DataDependentShape AdvancedIndexing IfElseBranch "
        "BuiltInDataStructure ViewAttribute Broadcast"
    ),
    url="https://github.com/open-mmlab/mmcv/blob/v2.1.0/mmcv/ops/nms.py",
)
def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Return the indices of boxes left by non-maximum suppression, best score first.

    Parameters
    ----------
    boxes : (N, 4) float, x1 y1 x2 y2 in pixels
    scores : (N,) float
    threshold : intersection over union above which the lower-scored box is suppressed, 0 to 1

    Returns (K,) int64
    Source: Felzenszwalb et al. 2010, section 7.2.
    """
    overlap = bbox_overlaps(boxes, boxes) > threshold
    remaining = scores.argsort(descending=True, stable=True)
    survivors = []
    while remaining.numel():
        best, remaining = remaining[0], remaining[1:]
        survivors.append(best)
        remaining = remaining[~overlap[best, remaining]]
    return torch.stack(survivors) if survivors else remaining
