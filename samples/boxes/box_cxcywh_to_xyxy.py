import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, images, queries: (draw.uniform(images, queries, 4, grad=True),),
    {
        "DETR R50, 800x1333, predictions of two images": (2, 100),
        "DINO R50, 4 scales, 800x1333, predictions of two images": (2, 900),
        "Deformable DETR R50, two stages, 800x1333, training, encoder": (2, 22223),
    },
    tags="ViewAttribute",
    url="https://github.com/facebookresearch/detr/blob/eb9f7e03ed8e2ed2cd55528989fe7df890bc3fc0/util/box_ops.py#L9",
)
def box_cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Convert boxes from centre and size to corners.

    Parameters
    ----------
    boxes : (..., 4) float, cx cy w h relative to the image, or in pixels

    Returns (..., 4) float, x1 y1 x2 y2 in the same unit
    Source: Carion et al. 2020 (DETR), `util/box_ops.py`.
    """
    cx, cy, w, h = boxes.unbind(-1)
    return torch.stack([cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h], dim=-1)
