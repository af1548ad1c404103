from torch import Tensor

from opgrip.samples.losses.gaussian_focal_loss import gaussian_targets
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, images: int, classes: int, objects: int, side: int = 128) -> Arguments:
    """Return predicted scores, most of them low, and target heatmaps.

    images, classes : number of images, and of classes with a heatmap
    objects : number of objects of each image
    side : height and width of a heatmap in cells
    """
    scores = draw.normal(images, classes, side, side, mean=-3.0, grad=True)
    return scores, gaussian_targets(draw, images, classes, side, objects)


@sample(
    inputs,
    {
        "CenterPoint PointPillars, nuScenes, training, heatmaps of cars, 4 scenes": (4, 1, 20),
        "CenterNet Hourglass-104, COCO, 511x511, training, one image": (1, 80, 7),
    },
    tags="IfElseBranch AdvancedIndexing DataDependentShape Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/a4d4fa7cfdcc6afe3766f3671b3c71ca01a552c6/bench/samples/long_tail/gaussian_sigmoid_focalloss/torch_impl.py",
)
def gaussian_sigmoid_focalloss(scores: Tensor, target: Tensor, gamma: float = 2.0, beta: float = 4.0) -> Tensor:
    """Return the focal loss of points, with low weights for their neighbours, divided by the number of points.

    Parameters
    ----------
    scores : (N, C, H, W) float, before the sigmoid
    target : (N, C, H, W) float, 1 at points and below 1 elsewhere
    gamma : exponent of the error of the probability
    beta : exponent of 1 minus the target of a neighbour

    Returns () float; not divided if the target has no points
    Source: Law and Deng 2018, "CornerNet", equation 1, as in its code; the original, of POD, is only published in
    DLOP-Bench.
    """
    points = target.eq(1)
    others = target.lt(1)
    probability = scores.sigmoid().clamp(min=1e-4, max=1 - 1e-4)
    at_points, elsewhere = probability[points], probability[others]
    distance = (1 - target[others]).pow(beta)
    loss = -((1 - elsewhere).log() * elsewhere.pow(gamma) * distance).sum()
    if at_points.numel() == 0:
        return loss
    return (loss - (at_points.log() * (1 - at_points).pow(gamma)).sum()) / points.float().sum()
