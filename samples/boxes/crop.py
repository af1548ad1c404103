import torch
from torch import Tensor

from opgrip.samples.boxes.sanitize_coordinates import sanitize_coordinates
from opgrip.samples.sample import sample


@sample(
    lambda draw, masks, size=138: (draw.uniform(size, size, masks, grad=True), draw.boxes(masks, (1.0, 1.0), 0.02)),
    {
        "YOLACT R101-FPN, 550x550, training, positives of an image of few truths": (20,),
        "YOLACT R101-FPN, 550x550, prediction, detections of an image": (100,),
    },
    tags="ViewAttribute Broadcast IfElseBranch",
    url="https://github.com/dbolya/yolact/blob/57b8f2d95e62e2e649b382f516ab41f949b57239/layers/box_utils.py#L350",
)
def crop(masks: Tensor, boxes: Tensor, padding: int = 1) -> Tensor:
    """Set masks to zero outside their boxes.

    Parameters
    ----------
    masks : (H, W, N) float
    boxes : (N, 4) float, x1 y1 x2 y2 relative to the image, x1 <= x2, y1 <= y2
    padding : number of cells added to boxes at each side

    Returns (H, W, N) float
    Source: Bolya et al. 2019 (YOLACT), section 3.2 and `layers/box_utils.py`.
    """
    height, width, count = masks.shape
    left, right = sanitize_coordinates(boxes[:, 0], boxes[:, 2], width, padding, cast=False)
    top, bottom = sanitize_coordinates(boxes[:, 1], boxes[:, 3], height, padding, cast=False)
    x = torch.arange(width, device=masks.device, dtype=left.dtype).view(1, -1, 1).expand(height, width, count)
    y = torch.arange(height, device=masks.device, dtype=top.dtype).view(-1, 1, 1).expand(height, width, count)
    inside = (x >= left) & (x < right) & (y >= top) & (y < bottom)
    return masks * inside.to(masks.dtype)
