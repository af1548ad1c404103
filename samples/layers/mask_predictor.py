import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import Arguments, Draw, sample

Image = tuple[float, int, int]
"""Factor by which an image was enlarged, and its original height and width in pixels."""


def inputs(
    draw: Draw, images: int, detections: int, classes: int, side: int, original: tuple[int, int] = (480, 640)
) -> Arguments:
    """Return detections of images of COCO, scaled to a shorter side of 800 pixels, in random order.

    Parameters
    ----------
    images, classes : number of images, and of classes with a heatmap
    detections : number of detections of each image
    side : height and width of a heatmap in cells
    original : height and width in pixels of all images before they are scaled
    """
    scale = 800 / original[0]
    count = images * detections
    boxes = draw.boxes(count, (800, original[1] * scale))
    image = draw.permutation(count) % images
    labels = draw.integers(count, high=classes)
    rois = torch.cat([image[:, None], boxes, draw.uniform(count, 1), labels[:, None]], dim=1)
    return rois, draw.uniform(count, classes, side, side), [(scale, *original)] * images, False


@sample(
    inputs,
    {
        "Mask R-CNN R50-FPN, COCO, predicting, 4 detections": (1, 4, 80, 28),
        "Mask R-CNN R50-FPN, COCO, predicting, 100 detections": (1, 100, 80, 28),
        "Hybrid Task Cascade R50-FPN, COCO, predicting, 2 images, 50 detections each": (2, 50, 80, 28),
    },
    tags=(
        "ForLoop IfElseBranch InputAware DataDependentShape AdvancedIndexing InPlace ViewAttribute BuiltInDataStructure"
    ),
    project="POD",
    url="https://arxiv.org/abs/1901.07518",
)
def mask_predictor(
    rois: Tensor, heatmaps: Tensor, images: list[Image], class_agnostic: bool = False, threshold: float = 0.5
) -> list[Tensor]:
    """Resize the mask of each detection's class to its box, and paste it into the image.

    Parameters
    ----------
    rois : (N, 7) float, image x1 y1 x2 y2 score class, in pixels of the enlarged image
    heatmaps : (N, classes or 1, h, w) float, probability of the object in the box
    images : scale and original size of each image, by index
    class_agnostic : True if all classes share one heatmap
    threshold : pixels with a higher probability belong to the object

    Returns N masks, (H, W) uint8 of 0 and 1, in the original size of the images
    Source: the last step of Mask R-CNN (He et al. 2017, section 3.1), shared by Hybrid Task Cascade (Chen et al. 2019),
    as described by LongTail-Bench's sample of that name; the original project, POD, is not public.
    """
    masks = [rois.new_zeros(0)] * len(rois)
    for number, (scale, height, width) in enumerate(images):
        (indices,) = torch.nonzero(rois[:, 0] == number, as_tuple=True)
        boxes = (rois[indices, 1:5] / scale).int().tolist()
        labels = rois[indices, 6].int().tolist()
        for row, (x1, y1, x2, y2), label in zip(indices.tolist(), boxes, labels, strict=True):
            heatmap = heatmaps[row, 0 if class_agnostic else label]
            size = (max(y2 - y1 + 1, 1), max(x2 - x1 + 1, 1))
            resized = functional.interpolate(heatmap[None, None], size, mode="bilinear", align_corners=False)[0, 0]
            canvas = torch.zeros(height, width, dtype=torch.uint8, device=rois.device)
            # a box may end at the image's edge, one pixel before its mask does
            target = canvas[y1 : y1 + size[0], x1 : x1 + size[1]]
            target.copy_(resized[: target.shape[0], : target.shape[1]] > threshold)
            masks[row] = canvas
    return masks
