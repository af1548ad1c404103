from torch import Tensor

from opgrip.samples.losses.get_softgauss_loss_weight import inputs
from opgrip.samples.losses.label_maps import CROPS, IGNORED
from opgrip.samples.losses.softgbw_loss import softgbw_loss
from opgrip.samples.sample import sample


@sample(
    inputs,
    CROPS,
    tags="ForLoop ThirdPartyCodes AdvancedIndexing InPlace ViewAttribute Reduce",
    url="https://github.com/DeepLink-org/DLOP-Bench/blob/a4d4fa7cfdcc6afe3766f3671b3c71ca01a552c6/bench/samples/long_tail/margin_loss/torch_impl.py",
)
def margin_loss(
    cls_score: Tensor,
    label: Tensor,
    margin: float = 0.85,
    sigma: float = 7.0,
    ignore_index: int = IGNORED,
    loss_weight: float = 1.0,
) -> Tensor:
    """Return `softgbw_loss` plus a hinge loss of correct pixels whose best score exceeds the second best by too little.

    Parameters
    ----------
    cls_score : (N, C, H, W) float, of two classes or more
    label : (N, H, W) int64
    margin : least difference of scores without loss
    sigma : standard deviation in pixels of the Gaussian that gives the weights
    ignore_index : class of ignored pixels
    loss_weight : factor of the loss

    Returns () float; the hinge loss is averaged over all pixels, including wrong ones, which contribute 0
    Source: SegmentBase2, only published in DLOP-Bench.
    """
    scores, ranked = cls_score.topk(2, dim=1)
    lacking = (margin - (scores[:, 0] - scores[:, 1])).clamp(min=0)
    lacking[ranked[:, 0] != label] = 0
    return loss_weight * (softgbw_loss(cls_score, label, sigma, ignore_index) + lacking.mean())
