from torch import Tensor

from opgrip.samples.boxes.box_area import box_area
from opgrip.samples.boxes.intersect import intersect
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, queries: int, truths: int) -> Arguments:
    return draw.boxes(queries, (1.0, 1.0), 0.02, grad=True), draw.boxes(truths, (1.0, 1.0), 0.02)


CONFIGURATIONS = {
    "DETR R50, 800x1333, training, matched queries of a layer": (20, 20),
    "DETR R50, 800x1333, training, queries and truths of two images": (200, 20),
    "DINO R50, 4 scales, 800x1333, training, queries and truths of two images": (1800, 20),
}


@sample(
    inputs,
    CONFIGURATIONS,
    tags="ViewAttribute Broadcast BuiltInDataStructure",
    url="https://github.com/facebookresearch/detr/blob/eb9f7e03ed8e2ed2cd55528989fe7df890bc3fc0/util/box_ops.py#L24",
)
def box_iou(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return intersection over union of every box with every other, and the area of the union.

    Parameters
    ----------
    first : (..., N, 4) float, x1 y1 x2 y2
    second : (..., M, 4) float, likewise

    Returns
    -------
    overlaps : (..., N, M) float, 0 to 1; nan if both boxes have no area
    unions : (..., N, M) float, areas

    Source: Carion et al. 2020 (DETR), `util/box_ops.py`.
    """
    shared = intersect(first, second)
    union = box_area(first)[..., :, None] + box_area(second)[..., None, :] - shared
    return shared / union, union
