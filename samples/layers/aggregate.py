from torch import Tensor

from opgrip.samples.layers import scaled_l2
from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, images: int, positions: int, channels: int, codes: int) -> Arguments:
    features, codewords, _ = scaled_l2.inputs(draw, images, positions, channels, codes)
    return draw.distribution(images, positions, codes, grad=True), features, codewords


@sample(
    inputs,
    scaled_l2.CONFIGURATIONS,
    tags="Reduce ViewAttribute Broadcast",
    url="https://github.com/open-mmlab/mmsegmentation/blob/504965184c3e6bc9ec43af54237129ef21981a5f/mmseg/ops/encoding.py#L47",
    rtol=1e-4,
    atol=1e-4,
)
def aggregate(assignment: Tensor, features: Tensor, codewords: Tensor) -> Tensor:
    """Return the residuals of all positions to each codeword, summed with the weights of the assignment.

    Parameters
    ----------
    assignment : (B, N, K) float, weights of codewords for each position
    features : (B, N, C) float, one vector per position
    codewords : (K, C) float

    Returns (B, K, C) float
    Source: Zhang et al. 2017, "Deep TEN: Texture Encoding Network", the residual encoding layer.
    """
    residuals = features[:, :, None] - codewords
    return (assignment[..., None] * residuals).sum(dim=1)
