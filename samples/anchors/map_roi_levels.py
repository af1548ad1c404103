import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, images: int, boxes: int) -> Arguments:
    """Return regions in the form of `rois`: `boxes` regions for each of `images` images."""
    number = torch.arange(images).repeat_interleave(boxes).to(torch.float32)
    return (torch.cat([number[:, None], draw.boxes(images * boxes)], dim=1),)


@sample(
    inputs,
    {
        "Faster R-CNN R50-FPN, 800x1333, prediction, proposals of an image": (1, 1000),
        "Faster R-CNN R50-FPN, 800x1333, training, sampled of two images": (2, 512),
        "Cascade R-CNN R50-FPN, 800x1333, prediction, proposals of eight images": (8, 1000),
    },
    tags="ViewAttribute",
    url="https://github.com/open-mmlab/mmdetection/blob/bde7b4b7eea9dd6ee91a486c6996b2d68662366d/mmdet/models/roi_heads/roi_extractors/single_level_roi_extractor.py#L36",
)
def map_roi_levels(rois: Tensor, num_levels: int = 4, finest_scale: float = 56) -> Tensor:
    """Return the pyramid level of each region; the level rises by one each time the side doubles.

    Parameters
    ----------
    rois : (N, 5) float, image x1 y1 x2 y2, in pixels
    num_levels : number of levels
    finest_scale : half of the side in pixels below which regions are of level 0; the side is the root of the area

    Returns (N,) int64, 0 to num_levels - 1
    Source: Lin et al. 2017 (feature pyramid networks), equation 1.
    """
    side = ((rois[:, 3] - rois[:, 1]) * (rois[:, 4] - rois[:, 2])).sqrt()
    level = (side / finest_scale + 1e-6).log2().floor()
    return level.clamp(min=0, max=num_levels - 1).long()
