import torch
from torch import Tensor

from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def gaussian_targets(draw: Draw, images: int, classes: int, side: int, objects: int) -> Tensor:
    """Return random heatmaps (images, classes, side, side) float32 with a Gaussian around each object, exactly 1 at its
    centre.

    side : height and width of a heatmap in cells
    objects : number of objects of each image
    """
    targets = torch.zeros(images, classes, side, side)
    along = torch.arange(side)
    for image in targets:
        kinds = draw.integers(objects, high=classes).tolist()
        for kind, (row, column) in zip(kinds, draw.integers(objects, 2, high=side).tolist(), strict=True):
            distance = (along - row).square().view(-1, 1) + (along - column).square()
            # a Gaussian of sigma 3, cut at three sigmas
            image[kind] = torch.maximum(image[kind], (-distance / 18).exp() * (distance <= 81))
    return targets


def inputs(draw: Draw, images: int, classes: int, objects: int, side: int = 128) -> Arguments:
    """Return predicted probabilities, most of them small, target heatmaps, and the number of all objects as divisor.

    images, classes : number of images, and of classes with a heatmap
    objects : number of objects of each image
    side : height and width of a heatmap in cells
    """
    pred = draw.normal(images, classes, side, side, mean=-3.0).sigmoid().clamp(1e-4, 1 - 1e-4).requires_grad_()
    return pred, gaussian_targets(draw, images, classes, side, objects), None, "mean", float(images * objects)


@sample(
    inputs,
    {
        "CenterPoint PointPillars, nuScenes, training, heatmaps of cars, 4 scenes": (4, 1, 20),
        "CenterNet R18, COCO, 512x512, training, one image": (1, 80, 7),
        "CornerNet Hourglass-104, COCO, 511x511, training, 3 images, one kind of corner": (3, 80, 7),
    },
    tags="IfElseBranch Reduce",
    url="https://github.com/open-mmlab/mmdetection/blob/bde7b4b7eea9dd6ee91a486c6996b2d68662366d/mmdet/models/losses/gaussian_focal_loss.py#L11",
)
def gaussian_focal_loss(
    pred: Tensor,
    gaussian_target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
    alpha: float = 2.0,
    gamma: float = 4.0,
) -> Tensor:
    """Return the focal loss of points, with low weights for their neighbours.

    Parameters
    ----------
    pred : (...) float, probabilities
    gaussian_target : (...) float, 1 at points and below 1 elsewhere
    weight : (...) float
    reduction, avg_factor : as in `weight_reduce_loss`
    alpha : exponent of the error of the probability
    gamma : exponent of 1 minus the target of a neighbour

    Returns () float, or (...) for the reduction "none"
    Source: Law and Deng 2018, "CornerNet", equation 1, as in MMDetection.
    """
    tiny = 1e-12
    points = gaussian_target.eq(1)
    distance = (1 - gaussian_target).pow(gamma)
    of_points = -(pred + tiny).log() * (1 - pred).pow(alpha) * points
    of_others = -(1 - pred + tiny).log() * pred.pow(alpha) * distance
    return weight_reduce_loss(of_points + of_others, weight, reduction, avg_factor)
