import torch
from torch import Tensor

from opgrip.samples.sample import sample


@sample(
    lambda draw, shape, kept, reduction="mean", avg_factor=None: (
        draw.uniform(*shape, high=4.0, grad=True),
        draw.mask(*shape, share=kept).float(),
        reduction,
        avg_factor,
    ),
    {
        "Faster R-CNN R50-FPN, 800x1333, training, classes of the second stage, 2 images": (
            (1024,),
            1.0,
            "mean",
            1024.0,
        ),
        "FCN R50-D8, Cityscapes 512x1024, training, pixels of 2 images, none averaged yet": (
            (2, 512, 1024),
            0.9,
            "none",
        ),
        "DeepLabV3 R50-D8, Cityscapes 512x1024, training, hard pixels of 2 images": ((2, 512, 1024), 0.2),
    },
    tags="IfElseBranch Reduce",
    url="https://github.com/open-mmlab/mmsegmentation/blob/504965184c3e6bc9ec43af54237129ef21981a5f/mmseg/models/losses/utils.py#L47",
)
def weight_reduce_loss(
    loss: Tensor, weight: Tensor | None = None, reduction: str = "mean", avg_factor: float | None = None
) -> Tensor:
    """Return losses times their weights, elementwise, as their sum or as their mean.

    Parameters
    ----------
    loss : (N, ...) float
    weight : float, broadcast to the shape of the losses; None for 1
    reduction : `none`, `mean` or `sum`
    avg_factor : divisor of a mean, None for the number of elements; not allowed for a sum

    Returns float, () or the shape of the losses

    Raises
    ------
    ValueError : if the reduction is unknown, or a sum has a divisor

    Source: MMSegmentation.
    """
    if weight is not None:
        loss = loss * weight
    if reduction == "none":
        return loss
    if reduction == "sum":
        if avg_factor is not None:
            raise ValueError("avg_factor requires the reduction mean, got sum")
        return loss.sum()
    if reduction != "mean":
        raise ValueError(f"unknown reduction {reduction}: choose none, mean or sum")
    if avg_factor is None:
        return loss.mean()
    # the divisor is 0 for an image without positives
    return loss.sum() / (avg_factor + torch.finfo(torch.float32).eps)
