from torch import Tensor

from opgrip.samples.boxes.box_area import box_area
from opgrip.samples.boxes.intersect import CONFIGURATIONS, inputs, intersect
from opgrip.samples.sample import sample


@sample(
    inputs,
    CONFIGURATIONS,
    tags="ViewAttribute Broadcast IfElseBranch",
    url="https://github.com/dbolya/yolact/blob/57b8f2d95e62e2e649b382f516ab41f949b57239/scripts/optimize_bboxes.py#L45",
)
def jaccard(first: Tensor, second: Tensor, crowd: bool = False) -> Tensor:
    """Return intersection over union of every box with every other.

    Parameters
    ----------
    first : (..., A, 4) float, x1 y1 x2 y2
    second : (..., B, 4) float, likewise
    crowd : True if `second` are crowd regions: divide by the area of the first box

    Returns (..., A, B) float, 0 to 1; nan if both boxes have no area
    Source: Bolya et al. 2019 (YOLACT), `scripts/optimize_bboxes.py`.
    """
    shared = intersect(first, second)
    area = box_area(first)[..., :, None]
    if crowd:
        return shared / area
    return shared / (area + box_area(second)[..., None, :] - shared)
