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
    url="https://github.com/open-mmlab/mmdetection/blob/bde7b4b7eea9dd6ee91a486c6996b2d68662366d/mmdet/core/bbox/coder/legacy_delta_xywh_bbox_coder.py#L85",
)
def legacy_bbox2delta(
    proposals: Tensor,
    gt: Tensor,
    means: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    stds: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
) -> Tensor:
    """Return the deltas that turn proposals into their truths, with sizes of x2 - x1 + 1 and y2 - y1 + 1.

    Parameters
    ----------
    proposals, gt : (N, 4) float, x1 y1 x2 y2 in pixels, where x2 and y2 belong to the box
    means, stds : means and standard deviations that normalize dx dy dw dh

    Returns (N, 4) float: dx dy relative to the size of the proposal, dw dh as logarithms
    Source: Girshick et al. 2014, appendix C, as in MMDetection 1.
    """
    proposals, gt = proposals.float(), gt.float()
    outward = proposals.new_tensor([-0.5, -0.5, 0.5, 0.5])
    return bbox2delta(proposals + outward, gt + outward, means, stds)
