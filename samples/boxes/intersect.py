import torch
from torch import Tensor

from opgrip.samples.boxes.box_area import area_between
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, first: int, second: int, classes: int = 0) -> Arguments:
    """Return `first` and `second` boxes relative to the image, for each of `classes` classes if it is not 0."""
    groups = (classes,) if classes else ()
    count = max(classes, 1)
    boxes = [draw.boxes(count * boxes, (1.0, 1.0), 0.02).reshape(*groups, boxes, 4) for boxes in (first, second)]
    return boxes[0], boxes[1]


CONFIGURATIONS = {
    "YOLACT R101-FPN, 550x550, Fast NMS, candidates of a class": (200, 200),
    "YOLACT R101-FPN, 550x550, training, truths and priors of an image": (7, 19248),
    "YOLACT R101-FPN, 550x550, Fast NMS, 20 classes of the 80": (200, 200, 20),
}


@sample(
    inputs,
    CONFIGURATIONS,
    tags="ViewAttribute Broadcast",
    url="https://github.com/dbolya/yolact/blob/57b8f2d95e62e2e649b382f516ab41f949b57239/scripts/optimize_bboxes.py#L24",
)
def intersect(first: Tensor, second: Tensor) -> Tensor:
    """Return the area of the intersection of every box with every other.

    Parameters
    ----------
    first : (..., A, 4) float, x1 y1 x2 y2
    second : (..., B, 4) float, likewise

    Returns (..., A, B) float, in the square of the boxes' unit; 0 if boxes do not overlap
    Source: Bolya et al. 2019 (YOLACT), `scripts/optimize_bboxes.py`.
    """
    first, second = first[..., :, None, :], second[..., None, :, :]
    low = torch.maximum(first[..., :2], second[..., :2])
    high = torch.minimum(first[..., 2:], second[..., 2:])
    return area_between(low, high)
