from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, channels, height, width, images=1: (
        draw.normal(images, channels, height, width, grad=True),
        draw.uniform(channels, low=0.5, high=1.5),
        draw.normal(channels, std=0.1),
        draw.normal(channels, std=0.1),
        draw.uniform(channels, low=0.5, high=1.5),
    ),
    {
        "DETR R50, 800x1333, training, one image, last layers": (512, 25, 42),
        "DETR R50, 800x1333, training, one image, first layer": (64, 400, 667),
    },
    tags="ViewAttribute Broadcast",
    url="https://github.com/facebookresearch/detr/blob/14602a71482082746399dd6bc5712a9aa8f804d2/models/backbone.py#L19",
)
def frozen_batchnorm2d(
    features: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float = 1e-5
) -> Tensor:
    """Normalize features by a fixed mean and variance, then scale and shift them.

    Parameters
    ----------
    features : (B, C, H, W) float
    weight, bias : (C,) float, scale and shift of the normalized features
    mean, variance : (C,) float
    eps : added to the variance

    Returns (B, C, H, W) float
    Source: Ioffe and Szegedy 2015, "Batch Normalization", algorithm 2, with both steps in one scale and shift.
    """
    scale = weight * (variance + eps).rsqrt()
    shift = bias - mean * scale
    return features * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)
