import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, features: tuple[int, int, int, int], rois: int, stride: int) -> Arguments:
    images, _, height, width = features
    boxes = draw.boxes(rois, (height * stride, width * stride), 4.0 * stride)
    number = draw.integers(rois, 1, high=images).to(torch.float32)
    return draw.normal(*features, grad=True), torch.cat([number, boxes], dim=1), 7, 1 / stride


@sample(
    inputs,
    {
        "built-in Faster R-CNN, 256x256, two images, P3": ((2, 64, 32, 32), 16, 8),
        "Faster R-CNN R50-FPN, 800x1333, P4, 100 of the proposals": ((1, 256, 50, 84), 100, 16),
    },
    tags="ForLoop AdvancedIndexing BuiltInDataStructure ViewAttribute Broadcast Reduce",
    url="https://github.com/open-mmlab/mmcv/blob/v2.1.0/mmcv/ops/roi_align.py",
)
def roi_align(features: Tensor, rois: Tensor, size: int, scale: float, samples: int = 2) -> Tensor:
    """Return the average of bilinear samples in each bin of a grid over each region.

    Parameters
    ----------
    features : (B, C, H, W) float
    rois : (N, 5) float, image x1 y1 x2 y2, in pixels of the image
    size : number of bins along a side
    scale : cells of the map per pixel
    samples : number of samples along each side of a bin

    Returns (N, C, size, size) float
    Source: He et al. 2017, section 3; half-pixel offset as in Detectron2's aligned version.
    """
    height, width = features.shape[2:]
    steps = (torch.arange(size * samples, device=rois.device, dtype=rois.dtype) + 0.5) / (size * samples)
    corner = rois[:, 1:3] * scale - 0.5
    extent = (rois[:, 3:] - rois[:, 1:3]) * scale
    columns, column_weights = _neighbours(corner[:, 0:1] + extent[:, 0:1] * steps, width)
    rows, row_weights = _neighbours(corner[:, 1:2] + extent[:, 1:2] * steps, height)
    image = rois[:, 0].long()[:, None, None]
    sampled = features.new_zeros(())
    for row, row_weight in zip(rows, row_weights, strict=True):
        for column, column_weight in zip(columns, column_weights, strict=True):
            weight = row_weight[:, :, None] * column_weight[:, None, :]
            cells = features[image, :, row[:, :, None], column[:, None, :]]
            sampled = sampled + cells * weight[..., None]
    bins = sampled.reshape(-1, size, samples, size, samples, features.shape[1]).mean(dim=(2, 4))
    return bins.permute(0, 3, 1, 2)


def _neighbours(position: Tensor, cells: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the indices of the two cells around each position, and the weights of both cells for a linear
    interpolation.

    position : (...) float, coordinate along one axis, in cells; weights are 0 more than one cell outside
    cells : number of cells along this axis
    """
    inside = (position >= -1) & (position <= cells)
    position = position.clamp(0, cells - 1)
    low = position.floor()
    fraction = position - low
    first = low.long()
    second = (first + 1).clamp(max=cells - 1)
    return (first, second), ((1 - fraction) * inside, fraction * inside)
