import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, images, landmarks, size: (draw.uniform(images, 2 * landmarks, low=-1.0, grad=True), size),
    {
        "sizes of IMM, CelebA 128x128, training, 10 landmarks of 50 faces, smallest maps": (50, 10, (16, 16)),
        "sizes of IMM, CelebA 128x128, training, 10 landmarks of 50 faces, largest maps": (50, 10, (128, 128)),
    },
    tags="ViewAttribute Broadcast",
    project="IMM",
    url="https://arxiv.org/abs/1806.07823",
)
def landmark2heatmap(landmark: Tensor, size: tuple[int, int] = (256, 256), inv_std: float = 20.0) -> Tensor:
    """Return one map per landmark, which decays with the square root of the distance along each axis.

    Parameters
    ----------
    landmark : (N, 2 * K) float, x y of each, from -1 to 1 across the image
    size : height and width of the maps
    inv_std : rate of the decay, per half image

    Returns (N, K, height, width) float, from 0 to 1
    Source: Jakab et al. 2018; the maps that separate into rows and columns, of the code published with it.
    """
    height, width = size
    x, y = landmark[:, 0::2].unsqueeze(-1), landmark[:, 1::2].unsqueeze(-1)
    columns = torch.linspace(-1.0, 1.0, width, dtype=landmark.dtype, device=landmark.device).view(1, 1, width)
    rows = torch.linspace(-1.0, 1.0, height, dtype=landmark.dtype, device=landmark.device).view(1, 1, height)
    # the root has an infinite gradient at zero
    across = (-(((x - columns) * inv_std).abs() + 1e-4).sqrt()).exp()
    down = (-(((y - rows) * inv_std).abs() + 1e-4).sqrt()).exp()
    return down.unsqueeze(3) @ across.unsqueeze(2)
