import torch
from torch import Tensor

from opgrip.samples.layers.multi_scale_deformable_attention import LEVELS
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, levels: list[tuple[int, int]], images: int) -> Arguments:
    """Return the shapes of the levels, and the unpadded share of each level's width and height for each image.

    The first image has no padding.

    levels : height and width of each level, in positions
    images : number of images
    """
    shapes = torch.tensor(levels)
    content = draw.uniform(images, 1, 2, low=0.6)
    content[0] = 1
    # rounded to positions of the level, as masks are
    return shapes, (content * shapes.flip(1)).ceil() / shapes.flip(1)


@sample(
    inputs,
    {
        "Mask2Former R50, 512x512, one image": ([(16, 16), (32, 32), (64, 64)], 1),
        "Deformable DETR R50, 800x1333, 2 images": (LEVELS, 2),
        "Deformable DETR R50, 800x1333, 16 images": (LEVELS, 16),
    },
    tags="ForLoop InputAware Broadcast ViewAttribute BuiltInDataStructure",
    project="Deformable DETR",
    url="https://arxiv.org/abs/2010.04159",
)
def deformable_reference_points(shapes: Tensor, valid_ratios: Tensor) -> Tensor:
    """Return the centre of each position of all levels, as a fraction of the padded width and height of each level.

    A centre is computed as a fraction of the unpadded image, and multiplied by the unpadded share of each level.

    Parameters
    ----------
    shapes : (levels, 2) int64, height and width of each level
    valid_ratios : (B, levels, 2) float, unpadded share of each level's width and height

    Returns (B, positions of all levels, levels, 2) float, x y: positions level by level and row by row, each of them
    relative to every level
    Source: Zhu et al. 2021, "Deformable DETR", section 4.1.
    """
    points = []
    for level, (height, width) in enumerate(shapes.tolist()):
        down, across = torch.meshgrid(
            torch.arange(height, device=valid_ratios.device) + 0.5,
            torch.arange(width, device=valid_ratios.device) + 0.5,
            indexing="ij",
        )
        centres = torch.stack([across / width, down / height], dim=2).view(-1, 2)
        points.append(centres / valid_ratios[:, level, None])
    return torch.cat(points, dim=1)[:, :, None] * valid_ratios[:, None]
