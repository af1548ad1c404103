from torch import Tensor

from opgrip.samples.losses.weight_reduce_loss import weight_reduce_loss
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, shape: tuple[int, ...], unknown: float | None = None, reduction: str = "mean") -> Arguments:
    target = draw.uniform(*shape)
    weight = None if unknown is None else draw.mask(*shape, share=unknown).float()
    return (target + draw.normal(*shape, std=0.05)).requires_grad_(), target, weight, reduction


@sample(
    inputs,
    {
        "DIM VGG16, Composition-1k 320x320, training, pixels of unknown opacity": ((1, 1, 320, 320), 0.3),
        "EDVR-M, REDS 256x256, training, 4 images": ((4, 3, 256, 256), None, "sum"),
        "BasicVSR, REDS 256x256, training, one clip of 15 frames": ((1, 15, 3, 256, 256),),
    },
    tags="IfElseBranch Reduce ViewAttribute",
    url="https://github.com/open-mmlab/mmediting/blob/ce2a70f1321907d1451a376637cf56be76168a67/mmedit/models/losses/pixelwise_loss.py#L41",
)
def charbonnier_loss(
    predicted: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    sample_wise: bool = False,
    eps: float = 1e-12,
) -> Tensor:
    """Return the Charbonnier loss, a distance that is smooth at zero.

    Parameters
    ----------
    predicted, target : (N, C, H, W) float, or of any shape without weights
    weight : (N, C, H, W) or (N, 1, H, W) float, or None for 1
    reduction : `none`, `mean` or `sum`; a mean divides by the sum of weights
    sample_wise : True to average each image separately if there are weights and a mean
    eps : added to the squared distance before its root is taken

    Returns () float, or the shape of both without reduction
    Source: Lai et al. 2017; weights as in MMEditing.
    """
    difference = predicted - target
    loss = (difference * difference + eps).sqrt()
    if weight is None or reduction != "mean":
        return weight_reduce_loss(loss, weight, reduction)
    weight = weight.expand_as(loss)
    loss = loss * weight
    # the divisors are 0 if all weights are 0
    if sample_wise:
        return (loss / (weight.sum(dim=(1, 2, 3), keepdim=True) + 1e-12)).sum() / len(loss)
    return loss.sum() / (weight.sum() + 1e-12)
