import torch
from torch import Tensor

from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Draw, sample


def gaussian_targets(draw: Draw, images: int, classes: int, side: int, objects: int) -> Tensor:
    """Heatmaps, (images, classes, side, side) float32, of Gaussians that reach exactly one at objects' centres."""
    targets = torch.zeros(images, classes, side, side)
    along = torch.arange(side)
    for image in targets:
        kinds = draw.integers(objects, high=classes).tolist()
        for kind, (row, column) in zip(kinds, draw.integers(objects, 2, high=side).tolist(), strict=True):
            distance = (along - row).square().view(-1, 1) + (along - column).square()
            # a Gaussian of sigma 3 ends at three of them
            image[kind] = torch.maximum(image[kind], (-distance / 18).exp() * (distance <= 81))
    return targets


def inputs(
    draw: Draw, images: int, classes: int, objects: int, side: int = 128
) -> tuple[Tensor, Tensor, None, str, float]:
    """Probabilities, most of them small, truths, and the number of objects to divide by."""
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
    project="MMDetection",
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
    """Focal loss of points against the rest, of which the neighbours of points count little.

    Parameters
    ----------
    pred : (...) float, probabilities
    gaussian_target : (...) float, one at points and below one elsewhere
    weight : (...) float
    reduction, avg_factor : as of `weight_reduce_loss`
    alpha : power of what the probability is off by
    gamma : power of what a neighbour's target lacks of one

    Returns () float, or (...) where the reduction is "none"
    Source: Law and Deng 2018, "CornerNet", equation 1, as in MMDetection.
    """
    tiny = 1e-12
    points = gaussian_target.eq(1)
    distance = (1 - gaussian_target).pow(gamma)
    of_points = -(pred + tiny).log() * (1 - pred).pow(alpha) * points
    of_others = -(1 - pred + tiny).log() * pred.pow(alpha) * distance
    return weight_reduce_loss(of_points + of_others, weight, reduction, avg_factor)
