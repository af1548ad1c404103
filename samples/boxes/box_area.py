from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, boxes: (draw.boxes(boxes, grad=True),),
    {
        "DETR R50, 800x1333, matching, queries of an image": (100,),
        "Faster R-CNN R50-FPN, 800x1333, proposals of an image": (1000,),
        "RetinaNet R50-FPN, 800x1333, anchors of an image": (201600,),
    },
    tags="ViewAttribute",
    url="https://github.com/pytorch/vision/blob/main/torchvision/ops/boxes.py",
)
def box_area(boxes: Tensor) -> Tensor:
    """Return the area of each box.

    Parameters
    ----------
    boxes : (..., 4) float, x1 y1 x2 y2 in pixels, or relative to the image

    Returns (...) float, in the square of that unit; not negative if x1 <= x2 and y1 <= y2
    Source: torchvision, `ops.boxes.box_area`.
    """
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def area_between(low: Tensor, high: Tensor) -> Tensor:
    """Return the areas (...) of rectangles, given the low and the high corner (..., 2) float of each.

    An area is 0 if the high corner is not above the low one in both x and y.
    """
    extent = (high - low).clamp(min=0)
    return extent[..., 0] * extent[..., 1]
