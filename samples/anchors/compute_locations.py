import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, featmap_size, stride, dense_points=1: (featmap_size, stride, dense_points),
    {
        "FCOS R50-FPN, 800x1333, P7": ((7, 11), 128),
        "FCOS R50-FPN, 800x1333, P3": ((100, 168), 8),
        "sizes of FCOS R50-FPN, 800x1333, P3, four points per cell": ((100, 168), 8, 4),
    },
    tags="ViewAttribute Broadcast IfElseBranch",
    project="POD",
    url="https://arxiv.org/abs/1904.01355",
)
def compute_locations(
    featmap_size: tuple[int, int], stride: int, dense_points: int = 1, device: torch.device | None = None
) -> Tensor:
    """Return the centres of the cells of a feature map, or several points per cell.

    Parameters
    ----------
    featmap_size : height and width of the map, in cells
    stride : side of a cell in pixels
    dense_points : points per cell: 1, the centre; 4, the centre shifted by a quarter of the stride in x and y; 5, both
    device : device of the result, or None for torch's default

    Returns (height * width * dense_points, 2) float32, x y in pixels; points of a cell vary fastest, then columns

    Raises
    ------
    ValueError : if `dense_points` is not 1, 4 or 5

    Source: Tian et al. 2019 (FCOS), section 3.1; the dense points follow LongTail-Bench's function of the same name.
    """
    height, width = featmap_size
    x = torch.arange(0, width * stride, step=stride, dtype=torch.float32, device=device)
    y = torch.arange(0, height * stride, step=stride, dtype=torch.float32, device=device)
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    centres = torch.stack([columns.reshape(-1), rows.reshape(-1)], dim=1) + stride // 2
    if dense_points <= 1:
        return centres
    step = stride // 4
    around = [[-step, -step], [step, -step], [-step, step], [step, step]]
    if dense_points == 5:
        around.insert(2, [0, 0])
    elif dense_points != 4:
        raise ValueError(f"{dense_points} points per cell: use 1, 4 or 5")
    points = torch.tensor(around, dtype=torch.float32, device=device)
    return (centres[:, None, :] + points).view(-1, 2)
