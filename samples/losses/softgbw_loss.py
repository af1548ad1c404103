import torch.nn.functional as F
from torch import Tensor

from opgrip.samples.losses.get_softgauss_loss_weight import get_softgauss_loss_weight, inputs
from opgrip.samples.losses.label_maps import CROPS, IGNORED
from opgrip.samples.sample import sample


@sample(
    inputs,
    CROPS,
    tags="ForLoop ThirdPartyCodes Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/21056ae1a86a88c9d5c55aa9f94511fdfe04c1f5/bench/samples/long_tail/softgbw_loss/torch_impl.py",
)
def softgbw_loss(
    cls_score: Tensor, label: Tensor, sigma: float = 7.0, ignore_index: int = IGNORED, loss_weight: float = 1.0
) -> Tensor:
    """Return the sum over pixels of cross entropy times `get_softgauss_loss_weight`, averaged over images.

    Parameters
    ----------
    cls_score : (N, C, H, W) float
    label : (N, H, W) int64
    sigma : standard deviation in pixels of the Gaussian that gives the weights
    ignore_index : class of ignored pixels
    loss_weight : factor of the loss

    Returns () float
    Source: DLOP-Bench, which does not name an origin.
    """
    weight = get_softgauss_loss_weight(cls_score, label, sigma).type_as(cls_score)
    cross_entropy = F.cross_entropy(cls_score, label, reduction="none", ignore_index=ignore_index)
    return loss_weight * (cross_entropy * weight).sum(dim=(1, 2)).mean()
