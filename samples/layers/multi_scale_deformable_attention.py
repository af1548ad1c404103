import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import Arguments, Draw, sample

LEVELS = [(100, 167), (50, 84), (25, 42), (13, 21)]
"""Feature maps of an image of 800x1333, at strides of 8 to 64."""


def inputs(
    draw: Draw, levels: list[tuple[int, int]], queries: int, images: int = 1, heads: int = 8, points: int = 4
) -> Arguments:
    """Return feature maps with 32 channels per head, and for each query points near one random position.

    Parameters
    ----------
    levels : height and width of each level, in positions
    queries, heads : number of queries of each image, and of attention heads
    images : number of images
    points : number of points of each query, head and level
    """
    positions = sum(height * width for height, width in levels)
    value = draw.normal(images, positions, heads, 32, grad=True)
    place = draw.uniform(images, queries, 1, 1, 1, 2)
    locations = place + 0.05 * draw.normal(images, queries, heads, len(levels), points, 2)
    weights = draw.distribution(images, queries, heads, len(levels) * points).unflatten(3, (len(levels), points))
    return value, torch.tensor(levels), locations.requires_grad_(), weights.requires_grad_()


@sample(
    inputs,
    {
        "Deformable DETR R50, 320x320, training, decoder": ([(40, 40), (20, 20), (10, 10), (5, 5)], 300),
        "DINO R50, 800x1333, training, decoder, without denoising": (LEVELS, 900),
        "Mask2Former R50, 512x512, training, pixel decoder": ([(16, 16), (32, 32), (64, 64)], 5376),
    },
    tags="ForLoop InputAware Reduce Broadcast ViewAttribute BuiltInDataStructure",
    project="Deformable DETR",
    url="https://arxiv.org/abs/2010.04159",
    rtol=1e-4,
    atol=1e-4,
)
def multi_scale_deformable_attention(value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """Return, per query and head, the weighted sum of features interpolated at a few points of each level.

    Parameters
    ----------
    value : (B, positions of all levels, heads, C) float, level by level and row by row
    shapes : (levels, 2) int64, height and width of each level
    locations : (B, Q, heads, levels, P, 2) float, x y relative to the image; features outside are zero
    weights : (B, Q, heads, levels, P) float, sum to 1 over levels and points

    Returns (B, Q, heads * C) float
    Source: Zhu et al. 2021, "Deformable DETR", equation 3.
    """
    images, _, heads, channels = value.shape
    sizes = shapes.tolist()
    grids = (2 * locations - 1).transpose(1, 2).flatten(0, 1)
    weights = weights.transpose(1, 2).flatten(0, 1)[:, None]
    mixed = value.new_zeros(images * heads, channels, locations.shape[1])
    parts = value.split([height * width for height, width in sizes], dim=1)
    for level, (part, (height, width)) in enumerate(zip(parts, sizes, strict=True)):
        maps = part.permute(0, 2, 3, 1).reshape(images * heads, channels, height, width)
        read = functional.grid_sample(maps, grids[:, :, level], align_corners=False)
        mixed = mixed + (read * weights[:, :, :, level]).sum(dim=3)
    return mixed.view(images, heads * channels, -1).transpose(1, 2).contiguous()
