from collections.abc import Sequence

import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int, side: float = 64.0, grad: bool = False) -> Arguments:
    """Return square priors, and distances as predicted by a head that ends with ReLU.

    boxes, side : number of priors, and the length of their sides in pixels
    grad : True if the distances require a gradient
    """
    corner = draw.uniform(boxes, 2, high=800.0)
    return torch.cat([corner, corner + side], dim=1), draw.normal(boxes, 4).relu().requires_grad_(grad)


@sample(
    inputs,
    {
        "FSAF R50-FPN, 800x1333, training, level P7": (77, 512.0, True),
        "FSAF R50-FPN, 800x1333, training, level P3": (16800, 32.0, True),
        "sizes of LongTail-Bench": (3000,),
    },
    tags="IfElseBranch ViewAttribute Broadcast",
    url="https://github.com/open-mmlab/mmdetection/blob/v3.3.0/mmdet/models/task_modules/coders/tblr_bbox_coder.py",
)
def tblr2bbox(
    priors: Tensor,
    tblr: Tensor,
    normalizer: float | Sequence[float] = 4.0,
    normalize_by_wh: bool = True,
    max_shape: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Return boxes from the distances of their edges to the centres of priors; the inverse of `bbox2tblr`.

    Parameters
    ----------
    priors : (..., N, 4) float, x1 y1 x2 y2 in pixels
    tblr : (..., N, 4) float: distances of the top, bottom, left and right edge
    normalizer : divisor of the distances, or a sequence of one divisor per edge
    normalize_by_wh : True if distances are relative to the size of the prior, False for pixels
    max_shape : height and width in pixels of the image, or of each image, that boxes are clipped to

    Returns (..., N, 4) float, x1 y1 x2 y2 in pixels
    Source: Zhu et al. 2019 (FSAF), section 3.1, normalized as in MMDetection.
    """
    distances = tblr * (normalizer if isinstance(normalizer, float) else tblr.new_tensor(normalizer))
    if normalize_by_wh:
        width, height = (priors[..., 2:] - priors[..., :2]).split(1, dim=-1)
        distances = torch.cat([distances[..., :2] * height, distances[..., 2:] * width], dim=-1)
    centre_x, centre_y = ((priors[..., :2] + priors[..., 2:]) / 2).split(1, dim=-1)
    top, bottom, left, right = distances.split(1, dim=-1)
    boxes = torch.cat([centre_x - left, centre_y - top, centre_x + right, centre_y + bottom], dim=-1)
    if max_shape is not None:
        # height, width to width, height, width, height, for each image
        most = priors.new_tensor(max_shape)[..., [1, 0, 1, 0]].unsqueeze(-2)
        boxes = torch.where(boxes < 0, boxes.new_zeros(()), boxes)
        boxes = torch.where(boxes > most, most, boxes)
    return boxes
