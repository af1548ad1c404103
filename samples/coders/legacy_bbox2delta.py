from torch import Tensor

from opgrip.samples.coders.bbox2delta import bbox2delta, inputs
from opgrip.samples.sample import sample


@sample(
    inputs,
    {
        "RetinaNet R50-FPN v1, 800x1333, training, positive anchors": (123,),
        "Faster R-CNN R50-FPN v1, 800x1333, training, positives of the second stage": (128,),
    },
    tags="ViewAttribute Broadcast InPlace",
    project="MMDetection",
    url="https://github.com/open-mmlab/mmdetection/blob/bde7b4b7eea9dd6ee91a486c6996b2d68662366d/mmdet/core/bbox/coder/legacy_delta_xywh_bbox_coder.py#L85",
)
def legacy_bbox2delta(
    proposals: Tensor,
    gt: Tensor,
    means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    stds: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
) -> Tensor:
    """Deltas that move proposals to their truths, both a pixel larger than their corners are apart.

    Parameters
    ----------
    proposals, gt : (N, 4) float, x1 y1 x2 y2 in pixels, all within the box
    means, stds : of dx dy dw dh, to normalize them by

    Returns (N, 4) float: dx dy in sizes of the proposal, dw dh as logarithms
    Source: Girshick et al. 2014, appendix C, as MMDetection 1 had it.
    """
    proposals, gt = proposals.float(), gt.float()
    outward = proposals.new_tensor([-0.5, -0.5, 0.5, 0.5])
    return bbox2delta(proposals + outward, gt + outward, means, stds)
