import torch
from torch import Tensor

from opgrip.samples.anchors.gen_base_anchors import RATIOS, RETINANET, gen_base_anchors
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, featmap_size: tuple[int, int], stride: int, scales: tuple[float, ...]) -> Arguments:
    base = gen_base_anchors(stride, torch.tensor(scales), torch.tensor(RATIOS))
    return base, featmap_size, (stride, stride)


@sample(
    inputs,
    {
        "Faster R-CNN R50-FPN, 800x1333, P6": ((13, 21), 64, (8.0,)),
        "Faster R-CNN R50-FPN, 800x1333, P2": ((200, 336), 4, (8.0,)),
        "RetinaNet R50-FPN, 800x1333, P3": ((100, 168), 8, RETINANET),
    },
    tags="ViewAttribute Broadcast",
    url="https://github.com/open-mmlab/mmdetection/blob/4bd4ace53a626659070204236da5b8e14ae9cd08/mmdet/core/anchor/anchor_generator.py#L318",
)
def grid_anchors(base_anchors: Tensor, featmap_size: tuple[int, int], stride: tuple[float, float] = (16, 16)) -> Tensor:
    """Return the anchors of all cells of a feature map, by shifting the anchors of the first cell.

    Parameters
    ----------
    base_anchors : (A, 4) float, x1 y1 x2 y2 in pixels, anchors of the first cell
    featmap_size : height and width of the map, in cells
    stride : width and height of a cell in pixels

    Returns (height * width * A, 4) float, x1 y1 x2 y2 in pixels; anchors of a cell vary fastest, then columns
    Source: Ren et al. 2015, section 3.1.1; MMDetection 2, `core.anchor.anchor_generator`.
    """
    height, width = featmap_size
    x = torch.arange(width, device=base_anchors.device).to(base_anchors.dtype) * stride[0]
    y = torch.arange(height, device=base_anchors.device).to(base_anchors.dtype) * stride[1]
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    shifts = torch.stack([columns, rows, columns, rows], dim=-1).reshape(-1, 1, 4)
    return (base_anchors[None, :, :] + shifts).view(-1, 4)
