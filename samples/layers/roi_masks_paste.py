import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw, detections: int, tight: bool, without_area: int = 0, side: int = 28, size: tuple[int, int] = (800, 1333)
) -> Arguments:
    """Return probabilities of masks and their boxes.

    Parameters
    ----------
    detections : number of masks
    tight : passed to `roi_masks_paste`
    without_area : number of boxes, from the first on, whose width and height are 0
    side : height and width of a mask in cells
    size : height and width of the image in pixels
    """
    boxes = draw.boxes(detections, size)
    boxes[:without_area, 2:] = boxes[:without_area, :2]
    return draw.uniform(detections, side, side), boxes, *size, tight


@sample(
    inputs,
    {
        "Mask R-CNN R50-FPN, 480x640, predicting, one detection": (1, True, 0, 28, (480, 640)),
        "Mask R-CNN R50-FPN, 800x1333, predicting, 4 detections at once, one without area": (4, False, 1),
    },
    tags=(
        "IfElseBranch InputAware DataDependentShape AdvancedIndexing InPlace Reduce Broadcast "
        "ViewAttribute BuiltInDataStructure"
    ),
    url="https://github.com/open-mmlab/mmdetection/blob/v3.3.0/mmdet/models/roi_heads/mask_heads/fcn_mask_head.py#L400",
    rtol=1e-4,
    atol=1e-4,
)
def roi_masks_paste(
    masks: Tensor, boxes: Tensor, height: int, width: int, tight: bool = True
) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Resample each mask at the pixels of an image, zero outside its box.

    Parameters
    ----------
    masks : (N, h, w) float, contents of the boxes, N > 0
    boxes : (N, 4) float, x1 y1 x2 y2 in pixels
    height, width : size of the image
    tight : True to crop the image to the boxes and one pixel around them

    Returns the masks, (N, H, W) float32, and the region they cover: x1 y1 x2 y2, integers
    Source: He et al. 2017, "Mask R-CNN", section 3.1; MMDetection.
    """
    x1, y1, x2, y2 = 0, 0, width, height
    if tight:
        x1, y1 = (boxes[:, :2].amin(dim=0).floor() - 1).clamp(min=0).int().tolist()
        x2, y2 = (boxes[:, 2:].amax(dim=0).ceil() + 1).int().tolist()
        x2, y2 = min(x2, width), min(y2, height)
    across = _shares(torch.arange(x1, x2, device=boxes.device), boxes[:, 0::2])
    down = _shares(torch.arange(y1, y2, device=boxes.device), boxes[:, 1::2])
    shape = (len(boxes), y2 - y1, x2 - x1)
    grid = torch.stack([across[:, None, :].expand(shape), down[:, :, None].expand(shape)], dim=3)
    pasted = functional.grid_sample(masks[:, None].float(), grid, align_corners=False)
    return pasted[:, 0], (x1, y1, x2, y2)


def _shares(pixels: Tensor, edges: Tensor) -> Tensor:
    """Return the position of each pixel's centre between two edges of each box, (N, pixels) float.

    A position is -1 at the first edge, 1 at the second edge, and 0 if the box has no area.

    pixels : indices of the pixels along one axis
    edges : (N, 2) float, coordinates in pixels of the first and the second edge of each box along this axis
    """
    shares = (pixels.float() + 0.5 - edges[:, :1]) / (edges[:, 1:] - edges[:, :1]) * 2 - 1
    endless = torch.isinf(shares)
    if endless.any():
        # for boxes without area: grid_sample is not defined there
        shares[endless] = 0
    return shares
