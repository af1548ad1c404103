import torch
import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.losses.label_maps import CROPS, IGNORED, label_maps
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, images: int, classes: int, size: tuple[int, int]) -> Arguments:
    return draw.normal(images, classes, *size, grad=True), label_maps(draw, images, size, classes)


@sample(
    inputs,
    CROPS,
    tags="Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/135b7e7e7187e2065bfb1567c31e6ce95ee6727c/bench/samples/long_tail/focal_loss/torch_impl.py",
)
def focal_loss(
    cls_score: Tensor,
    label: Tensor,
    alpha: float = 1.0,
    gamma: float = 2.0,
    ignore_index: int = IGNORED,
    loss_weight: float = 1.0,
) -> Tensor:
    """Return cross entropy weighted by a power of 1 minus the true class's probability, averaged over all pixels.

    Parameters
    ----------
    cls_score : (N, C, ...) float
    label : (N, ...) int64
    alpha : factor of the loss of all pixels
    gamma : exponent of 1 minus the probability of the true class
    ignore_index : label of pixels with loss 0, which still count in the mean
    loss_weight : factor of the loss

    Returns () float
    Source: Lin et al. 2017, equation 4, for exclusive classes; the original, of SegmentBase2, is only published in
    DLOP-Bench.
    """
    cross_entropy = F.cross_entropy(cls_score, label, reduction="none", ignore_index=ignore_index)
    probability = torch.exp(-cross_entropy)
    return loss_weight * (alpha * (1 - probability) ** gamma * cross_entropy).mean()
