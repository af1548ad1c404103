import torch
from torch import Tensor

from opgrip.samples.coders.decode import VARIANCES
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, priors: int) -> Arguments:
    boxes = draw.boxes(priors, (1.0, 1.0), smallest=0.04)
    centre, extent = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    return draw.near(boxes), torch.cat([centre, extent], dim=1)


@sample(
    inputs,
    {
        "SSD300 VGG16, training, truths of all priors": (8732,),
        "YOLACT R101-FPN, 550x550, training, truths of all priors": (19248,),
    },
    tags="IfElseBranch ViewAttribute InPlace",
    url="https://github.com/dbolya/yolact/blob/57b8f2d95e62e2e649b382f516ab41f949b57239/layers/box_utils.py#L230",
)
def encode(matched: Tensor, priors: Tensor, use_yolo_regressors: bool = False) -> Tensor:
    """Return the regression targets that turn priors into their truths; the inverse of `decode`.

    Parameters
    ----------
    matched : (N, 4) float, x1 y1 x2 y2 relative to the image
    priors : (N, 4) float, cx cy w h relative to the image
    use_yolo_regressors : True to shift centres relative to the image, without variances, as in YOLOv2

    Returns (N, 4) float: shift of the centre relative to the size of the prior, and logarithms of the scale, both
    divided by `VARIANCES`
    Source: Liu et al. 2016 (SSD), section 2.2; the option: Redmon and Farhadi 2017 (YOLOv2), section 2.
    """
    shift = (matched[:, :2] + matched[:, 2:]) / 2 - priors[:, :2]
    growth = ((matched[:, 2:] - matched[:, :2]) / priors[:, 2:]).log()
    if not use_yolo_regressors:
        shift /= VARIANCES[0] * priors[:, 2:]
        growth = growth / VARIANCES[1]
    return torch.cat([shift, growth], dim=1)
