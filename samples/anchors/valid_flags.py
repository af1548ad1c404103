import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, featmap_size, valid_size, num_base_anchors: (featmap_size, valid_size, num_base_anchors),
    {
        "Faster R-CNN R50-FPN, 800x1333, P6": ((13, 21), (13, 21), 3),
        "RetinaNet R50-FPN, 800x1333, P3, in a batch with an image of 1333x800": ((168, 168), (100, 168), 9),
    },
    tags="ViewAttribute Broadcast InPlace",
    url="https://github.com/open-mmlab/mmdetection/blob/c76ab0eb3c637b86c343d8454e07e00cfecc1b78/mmdet/core/anchor/point_generator.py#L30",
)
def valid_flags(
    featmap_size: tuple[int, int],
    valid_size: tuple[int, int],
    num_base_anchors: int = 1,
    device: torch.device | None = None,
) -> Tensor:
    """Return which anchors of a feature map belong to a cell inside the unpadded image.

    Parameters
    ----------
    featmap_size : height and width of the map, in cells
    valid_size : height and width of the part of the map that the image covers, in cells
    num_base_anchors : anchors per cell
    device : device of the result, or None for torch's default

    Returns (height * width * num_base_anchors,) bool, in the order of `grid_anchors`
    Source: MMDetection 2, `core.anchor`.
    """
    height, width = featmap_size
    rows = torch.zeros(height, dtype=torch.bool, device=device)
    columns = torch.zeros(width, dtype=torch.bool, device=device)
    rows[: valid_size[0]] = True
    columns[: valid_size[1]] = True
    cells = (rows[:, None] & columns[None, :]).view(-1, 1)
    return cells.expand(-1, num_base_anchors).reshape(-1)
