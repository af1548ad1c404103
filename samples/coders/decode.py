import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample

VARIANCES = 0.1, 0.2
"""Divisors of SSD's targets, of centres and of sizes."""


def inputs(draw: Draw, priors: int, grad: bool = False) -> Arguments:
    centre, extent = draw.uniform(priors, 2), draw.uniform(priors, 2, low=0.04, high=0.9)
    return draw.normal(priors, 4, grad=grad), torch.cat([centre, extent], dim=1)


@sample(
    inputs,
    {
        "SSD300 VGG16, inference": (8732,),
        "YOLACT R101-FPN, 550x550, inference": (19248,),
    },
    tags="IfElseBranch ViewAttribute InPlace",
    url="https://github.com/dbolya/yolact/blob/57b8f2d95e62e2e649b382f516ab41f949b57239/layers/box_utils.py#L268",
)
def decode(loc: Tensor, priors: Tensor, use_yolo_regressors: bool = False) -> Tensor:
    """Return the boxes that result from applying predictions to priors; the inverse of `encode`.

    Parameters
    ----------
    loc : (N, 4) float: shift of the centre relative to the size of the prior, and logarithms of the scale, both divided
        by `VARIANCES`
    priors : (N, 4) float, cx cy w h relative to the image
    use_yolo_regressors : True if `loc` shifts centres relative to the image, without variances, as in YOLOv2

    Returns (N, 4) float, x1 y1 x2 y2 relative to the image
    Source: Liu et al. 2016 (SSD), section 2.2; the option: Redmon and Farhadi 2017 (YOLOv2), section 2.
    """
    if use_yolo_regressors:
        centre, extent = priors[:, :2] + loc[:, :2], priors[:, 2:] * loc[:, 2:].exp()
    else:
        centre = priors[:, :2] + loc[:, :2] * VARIANCES[0] * priors[:, 2:]
        extent = priors[:, 2:] * (loc[:, 2:] * VARIANCES[1]).exp()
    boxes = torch.cat([centre, extent], dim=1)
    boxes[:, :2] -= boxes[:, 2:] / 2
    boxes[:, 2:] += boxes[:, :2]
    return boxes
