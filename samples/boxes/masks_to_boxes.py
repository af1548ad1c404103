import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, masks: int, height: int, width: int) -> Arguments:
    """Return masks, (masks, height, width) bool, that each fill most cells of a box."""
    boxes = draw.boxes(masks, (height, width))
    x, y = torch.arange(width), torch.arange(height)
    columns = (x >= boxes[:, 0:1]) & (x < boxes[:, 2:3])
    rows = (y >= boxes[:, 1:2]) & (y < boxes[:, 3:4])
    return (rows[:, :, None] & columns[:, None, :] & draw.mask(masks, height, width, share=0.9),)


@sample(
    inputs,
    {
        "DETR R50, panoptic, 2 segments of a COCO image of 480x640": (2, 480, 640),
        "DETR R50, panoptic, 12 segments of a COCO image of 480x640": (12, 480, 640),
    },
    tags="ViewAttribute Broadcast Reduce IfElseBranch",
    url="https://github.com/facebookresearch/detr/blob/eb9f7e03ed8e2ed2cd55528989fe7df890bc3fc0/util/box_ops.py#L64",
)
def masks_to_boxes(masks: Tensor) -> Tensor:
    """Return the smallest box around each mask.

    Parameters
    ----------
    masks : (N, H, W) bool, or numbers 0 and 1

    Returns (N, 4) float32, x1 y1 x2 y2: first and last column and row of the mask; 1e8 1e8 0 0 for an empty mask
    Source: Carion et al. 2020 (DETR), `util/box_ops.py`.
    """
    if masks.numel() == 0:
        return torch.zeros((0, 4), device=masks.device)
    height, width = masks.shape[-2:]
    y = torch.arange(height, dtype=torch.float32, device=masks.device)
    x = torch.arange(width, dtype=torch.float32, device=masks.device)
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    x1, x2 = _range(masks, columns)
    y1, y2 = _range(masks, rows)
    return torch.stack([x1, y1, x2, y2], dim=1)


def _range(masks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest of the positions inside each mask, (N,) float each.

    Parameters
    ----------
    masks : (N, H, W) bool, or numbers 0 and 1
    positions : (H, W) float, column or row of each cell
    """
    held = masks * positions
    least = held.masked_fill(~masks.bool(), 1e8).flatten(1).amin(dim=1)
    return least, held.flatten(1).amax(dim=1)
