from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample

CONFIGURATIONS = {
    "Deep TEN, 352x352, training, sizes of the paper": (1, 121, 128, 32),
    "EncNet R50-D8, 256x256, training, one image": (1, 1024, 512, 32),
}
"""Sizes of encoding layers."""


def inputs(draw: Draw, images: int, positions: int, channels: int, codes: int) -> Arguments:
    bound = (codes * channels) ** -0.5
    return (
        draw.normal(images, positions, channels, grad=True),
        draw.uniform(codes, channels, low=-bound, high=bound, grad=True),
        draw.uniform(codes, low=-1, high=0, grad=True),
    )


@sample(
    inputs,
    CONFIGURATIONS,
    tags="Reduce ViewAttribute Broadcast",
    url="https://github.com/open-mmlab/mmsegmentation/blob/504965184c3e6bc9ec43af54237129ef21981a5f/mmseg/ops/encoding.py#L34",
    rtol=1e-4,
)
def scaled_l2(features: Tensor, codewords: Tensor, scale: Tensor) -> Tensor:
    """Return the squared distance of each feature to each codeword, times the codeword's smoothing factor.

    Parameters
    ----------
    features : (B, N, C) float, one vector per position
    codewords : (K, C) float
    scale : (K,) float, the smoothing factors

    Returns (B, N, K) float; a softmax over the last dimension assigns positions to codewords
    Source: Zhang et al. 2017, "Deep TEN: Texture Encoding Network", the residual encoding layer.
    """
    residuals = features[:, :, None] - codewords
    return scale * residuals.pow(2).sum(dim=3)
