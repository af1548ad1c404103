from collections.abc import Sequence

import torch
from torch import Tensor

from opgrip.samples.coders.bbox2delta import inputs
from opgrip.samples.sample import sample


@sample(
    inputs,
    {
        "sizes of LongTail-Bench": (3000,),
        "sizes of LongTail-Bench, largest": (5000,),
    },
    tags="IfElseBranch ViewAttribute Broadcast InPlace",
    url="https://github.com/open-mmlab/mmdetection/blob/v3.3.0/mmdet/models/task_modules/coders/tblr_bbox_coder.py",
)
def bbox2tblr(
    priors: Tensor, gts: Tensor, normalizer: float | Sequence[float] = 4.0, normalize_by_wh: bool = True
) -> Tensor:
    """Return the distances of a truth's top, bottom, left and right edges from the centre of its prior.

    Parameters
    ----------
    priors, gts : (N, 4) float, x1 y1 x2 y2 in pixels
    normalizer : divisor of the distances, or a sequence of one divisor per edge
    normalize_by_wh : True for distances relative to the size of the prior, False for pixels

    Returns (N, 4) float, positive if the centre is inside the truth
    Source: Zhu et al. 2019 (FSAF), section 3.1, normalized as in MMDetection.
    """
    centre_x, centre_y = ((priors[:, :2] + priors[:, 2:]) / 2).split(1, dim=1)
    left, top, right, bottom = gts.split(1, dim=1)
    distances = torch.cat([centre_y - top, bottom - centre_y, centre_x - left, right - centre_x], dim=1)
    if normalize_by_wh:
        width, height = (priors[:, 2:] - priors[:, :2]).split(1, dim=1)
        distances[:, :2] /= height
        distances[:, 2:] /= width
    return distances / (normalizer if isinstance(normalizer, float) else distances.new_tensor(normalizer))
