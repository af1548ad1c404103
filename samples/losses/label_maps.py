"""Random targets of segmentation losses."""

import torch
from torch import Tensor

from opgrip.samples.sample import Draw

IGNORED = 255
"""Label of ignored pixels, as in Pascal VOC and Cityscapes."""

CROPS = {
    "UNet-S5-D16, DRIVE, 64x64 crops, training": (4, 2, (64, 64)),
    "DeepLabV3+ R50-D8, Pascal VOC, 512x512 crops, training, one image": (1, 21, (512, 512)),
}
"""Sizes of the training batches of two segmentation models."""


def label_maps(
    draw: Draw, images: int, size: tuple[int, int], classes: int, objects: int = 8, border: int = 2
) -> Tensor:
    """Return classes of pixels, (images, *size) int64: boxes of other classes on a background of class 0.

    Parameters
    ----------
    size : height and width
    classes, objects : number of classes with the background, and of boxes in each image
    border : width in pixels of the `IGNORED` border around an object, as in Pascal VOC
    """
    labels = torch.zeros(images, *size, dtype=torch.int64)
    for image in labels:
        corners = draw.boxes(objects, size, smallest=4.0).long().tolist()
        kinds = draw.integers(objects, low=min(1, classes - 1), high=classes).tolist()
        for (left, top, right, bottom), kind in zip(corners, kinds, strict=True):
            image[max(top - border, 0) : bottom + border, max(left - border, 0) : right + border] = IGNORED
            image[top:bottom, left:right] = kind
    return labels


def edge_maps(draw: Draw, images: int, size: tuple[int, int]) -> Tensor:
    """Return edge maps, (images, *size) int64: 1 on an edge, 0 elsewhere, and a few `IGNORED` rows."""
    labels = label_maps(draw, images, size, classes=8, border=0)
    edges = torch.zeros_like(labels)
    edges[:, 1:] |= (labels[:, 1:] != labels[:, :-1]).long()
    edges[:, :, 1:] |= (labels[:, :, 1:] != labels[:, :, :-1]).long()
    edges[:, -2:] = IGNORED
    return edges
