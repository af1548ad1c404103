from torch import Tensor

from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, shape: tuple[int, ...]) -> Arguments:
    target = draw.normal(*shape)
    return (target + draw.normal(*shape, std=0.3)).requires_grad_(), target


@sample(
    inputs,
    {
        "ResNet-50 distilled, 224x224, training, logits of ImageNet's classes, 32 images": ((32, 1000),),
        "PSPNet R50-D8 distilled, Cityscapes 512x1024, training, logits at an eighth, 2 images": ((2, 19, 64, 128),),
        "PSPNet R50-D8 distilled, Cityscapes 512x1024, training, features at an eighth, 2 images": ((2, 512, 64, 128),),
    },
    tags="IfElseBranch Reduce",
    url="https://github.com/open-mmlab/mmdetection/blob/main/mmdet/models/losses/l2_loss.py",
)
def l2_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    avg_factor: float | None = None,
) -> Tensor:
    """Return squared differences.

    Parameters
    ----------
    predicted, target : (N, ...) float
    weight, reduction, avg_factor : as in `weight_reduce_loss`

    Returns () float, or the shape of both without reduction
    Source: MMDetection; without weights, the mean square.
    """
    difference = predicted - target
    return weight_reduce_loss(difference * difference, weight, reduction, avg_factor)
