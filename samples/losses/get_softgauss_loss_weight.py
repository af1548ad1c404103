from itertools import pairwise
from math import ceil
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opgrip.samples.losses.focal_loss import inputs as pixels
from opgrip.samples.losses.label_maps import CROPS, IGNORED
from opgrip.samples.sample import Arguments, Draw, sample

Array: TypeAlias = NDArray[Any]

TANGENT = np.tan(np.pi / 8)
"""Tangent of the angle within which a gradient counts as parallel to an axis."""


def inputs(draw: Draw, images: int, classes: int, size: tuple[int, int]) -> Arguments:
    """Return scores of mostly correct classes, (images, classes, *size), and the true classes of the pixels.

    size : height and width of the images in pixels
    """
    scores, labels = pixels(draw, images, classes, size)
    right = torch.nn.functional.one_hot(labels % IGNORED, classes).movedim(-1, 1)
    return (scores.detach() + 4 * right).requires_grad_(), labels


@sample(
    inputs,
    CROPS,
    tags="ForLoop ThirdPartyCodes Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/a4d4fa7cfdcc6afe3766f3671b3c71ca01a552c6/bench/samples/long_tail/get_softgauss_loss_weight/torch_impl.py",
)
def get_softgauss_loss_weight(logit: Tensor, target: Tensor, sigma: float = 7.0) -> Tensor:
    """Return 1 plus a Gaussian of the distance to the nearest edge or wrong pixel, divided by the sum of the image.

    Parameters
    ----------
    logit : (N, C, H, W) float, scores of the classes
    target : (N, H, W) int64, classes of the pixels, below 255; 255 has weight 0
    sigma : standard deviation of the Gaussian in pixels

    Returns (N, H, W) float64 on the CPU, with a sum of 1 for each image
    Source: DLOP-Bench, with OpenCV's Canny edges and distances; it does not name an origin.
    """
    predictions = logit.argmax(dim=1).cpu().numpy()
    labels = target.detach().cpu().numpy()
    weights = np.zeros(labels.shape)
    for weight, label, prediction in zip(weights, labels, predictions, strict=True):
        ignored = label == IGNORED
        class_map = np.where(ignored, 0, label)
        edges = _edges(class_map)
        edges[class_map != np.where(ignored, 0, prediction)] = True
        # beyond six sigmas, 1 plus the Gaussian rounds to 1 in float32
        weight[:] = 1 + np.exp(-_squared_distances(edges, reach=ceil(6 * sigma)) / (2 * sigma**2))
        weight[ignored] = 0
        weight /= weight.sum() + 1e-10
    return torch.from_numpy(weights)


def _edges(image: Array) -> Array:
    """Return which pixels of an image are edges by Canny's method with both thresholds at 1, (H, W) bool.

    An edge is a pixel whose gradient is above 1 and is the largest along the direction of the gradient.

    image : (H, W) numbers

    Source: Canny 1986, with the L1 norm of Sobel's gradient and OpenCV's rules for ties.
    """
    around = np.pad(image, 1, mode="edge")
    columns = around[:-2] + 2 * around[1:-1] + around[2:]
    across = columns[:, 2:] - columns[:, :-2]
    rows = around[:, :-2] + 2 * around[:, 1:-1] + around[:, 2:]
    down = rows[2:] - rows[:-2]
    size = np.abs(across) + np.abs(down)
    near = np.pad(size, 1)

    def at(row: int, column: int) -> Array:
        return near[1 + row : 1 + row + len(size), 1 + column : 1 + column + size.shape[1]]

    level = np.abs(down) < np.abs(across) * TANGENT
    upright = np.abs(down) > np.abs(across) / TANGENT
    falling = (across < 0) == (down < 0)
    largest = np.where(falling, (size > at(-1, -1)) & (size > at(1, 1)), (size > at(-1, 1)) & (size > at(1, -1)))
    largest = np.where(upright, (size > at(-1, 0)) & (size >= at(1, 0)), largest)
    largest = np.where(level, (size > at(0, -1)) & (size >= at(0, 1)), largest)
    edges: Array = largest & (size > 1)
    return edges


def _squared_distances(marks: Array, reach: int) -> Array:
    """Return the squared distance of each pixel to the nearest mark, (H, W) float32, in pixels.

    A distance is too large if no mark is within `reach` columns. First the nearest mark within each column is found,
    then the nearest of these in the neighbouring columns.

    marks : (H, W) bool, True for marked pixels
    reach : number of columns on each side that are searched
    """
    nearest = np.where(marks, np.float32(0), np.float32(np.inf))
    for rows in (nearest, nearest[::-1]):
        for before, row in pairwise(rows):
            np.minimum(row, before + 1, out=row)
    width = nearest.shape[1]
    columns = np.pad(nearest**2, ((0, 0), (reach, reach)), constant_values=np.inf)
    nearest = columns[:, reach : reach + width].copy()
    for shift in range(1, reach + 1):
        for start in (reach - shift, reach + shift):
            np.minimum(nearest, columns[:, start : start + width] + np.float32(shift**2), out=nearest)
    return nearest
