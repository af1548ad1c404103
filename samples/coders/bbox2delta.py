import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, boxes: int, size: tuple[int, int] = (800, 1333)) -> Arguments:
    proposals = draw.boxes(boxes, size)
    return proposals, draw.near(proposals)


@sample(
    inputs,
    {
        "Faster R-CNN R50-FPN, 800x1333, training, positives of the second stage": (128,),
        "RetinaNet R50-FPN, 800x1333, training, positive anchors": (412,),
    },
    tags="ViewAttribute Broadcast InPlace",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/core/bbox/coder/delta_xywh_bbox_coder.py#L117",
)
def bbox2delta(
    proposals: Tensor,
    gt: Tensor,
    means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    stds: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
) -> Tensor:
    """Return the deltas that turn proposals into their truths.

    Parameters
    ----------
    proposals, gt : (N, 4) float, x1 y1 x2 y2 in pixels
    means, stds : means and standard deviations that normalize dx dy dw dh

    Returns (N, 4) float: dx dy relative to the size of the proposal, dw dh as logarithms
    Source: Girshick et al. 2014, appendix C.
    """
    proposals, gt = proposals.float(), gt.float()
    centre = (proposals[:, :2] + proposals[:, 2:]) / 2
    extent = proposals[:, 2:] - proposals[:, :2]
    shift = ((gt[:, :2] + gt[:, 2:]) / 2 - centre) / extent
    growth = ((gt[:, 2:] - gt[:, :2]) / extent).log()
    deltas = torch.cat([shift, growth], dim=1)
    return deltas.sub_(deltas.new_tensor(means)).div_(deltas.new_tensor(stds))
