import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int, img_size: int, padding: int, cast: bool) -> Arguments:
    corners = draw.boxes(boxes, (1.0, 1.0), 0.02)
    return corners[:, 0], corners[:, 2], img_size, padding, cast


@sample(
    inputs,
    {
        "YOLACT R101-FPN, 550x550, prediction, boxes on the prototypes": (100, 138, 1, False),
        "YOLACT R101-FPN, 550x550, prediction, boxes on the image": (100, 550, 0, True),
    },
    tags="IfElseBranch BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/models/dense_heads/yolact_head.py#L876",
)
def sanitize_coordinates(
    x1: Tensor, x2: Tensor, img_size: int, padding: int = 0, cast: bool = True
) -> tuple[Tensor, Tensor]:
    """Return coordinates in pixels, clipped to the image, with the first not above the second.

    Parameters
    ----------
    x1, x2 : (N,) float, two edges of boxes relative to the image
    img_size : size of the image in pixels
    padding : pixels added to boxes at each side
    cast : True to truncate to int64

    Returns x1, x2 : (N,) float or int64
    Source: MMDetection's YOLACT, of Bolya et al. 2019.
    """
    x1, x2 = x1 * img_size, x2 * img_size
    if cast:
        x1, x2 = x1.long(), x2.long()
    x1 = torch.minimum(x1, x2)
    x2 = torch.maximum(x1, x2)
    return (x1 - padding).clamp(min=0), (x2 + padding).clamp(max=img_size)
