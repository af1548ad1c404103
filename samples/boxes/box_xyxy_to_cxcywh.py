import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, boxes: (draw.boxes(boxes),),
    {
        "DETR R50, 800x1333, training, truths of an image": (20,),
        "DINO R50, 4 scales, 800x1333, training, noisy truths": (400,),
    },
    tags="ViewAttribute",
    url="https://github.com/facebookresearch/detr/blob/eb9f7e03ed8e2ed2cd55528989fe7df890bc3fc0/util/box_ops.py#L16",
)
def box_xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """Convert boxes from corners to centre and size.

    Parameters
    ----------
    boxes : (..., 4) float, x1 y1 x2 y2 in pixels, or relative to the image

    Returns (..., 4) float, cx cy w h in the same unit
    Source: Carion et al. 2020 (DETR), `util/box_ops.py`.
    """
    x1, y1, x2, y2 = boxes.unbind(-1)
    return torch.stack([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1], dim=-1)
