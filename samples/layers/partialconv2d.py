import torch
from torch import Tensor
from torch.nn import functional

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(
    draw: Draw, size: int, channels: int, filters: int, kernel: int, share: float = 0.7, multi_channel: bool = True
) -> Arguments:
    """Return features with holes, and the weights of a convolution that halves their height and width.

    Parameters
    ----------
    size : height and width of the features, in pixels
    channels, filters : number of channels of the features, and of the convolution's result
    kernel : height and width of the convolution's kernel
    share : share of valid pixels, outside the holes
    multi_channel : True for a mask of each channel, False for one mask of all channels
    """
    # holes of 8 x 8 pixels, or of one pixel in small feature maps
    cells = max(size // 8, 4)
    valid = draw.mask(1, 1, cells, cells, share=share).float()
    valid = functional.interpolate(valid, size=(size, size))
    bound = (channels * kernel**2) ** -0.5
    return (
        draw.normal(1, channels, size, size, grad=True),
        valid.repeat(1, channels, 1, 1) if multi_channel else valid,
        draw.uniform(filters, channels, kernel, kernel, low=-bound, high=bound, grad=True),
        draw.uniform(filters, low=-bound, high=bound, grad=True),
        2,
        kernel // 2,
        1,
        multi_channel,
    )


@sample(
    inputs,
    {
        "PConv, Places 256x256, training, one image, last layer of the encoder": (4, 512, 512, 3),
        "PConv, Places 256x256, training, one image, second layer": (128, 64, 128, 5),
        "PConv, Places 256x256, one image, first layer, a mask for all channels": (256, 3, 64, 7, 0.7, False),
    },
    tags="IfElseBranch Broadcast ViewAttribute BuiltInDataStructure",
    url="https://github.com/open-mmlab/mmediting/blob/ce2a70f1321907d1451a376637cf56be76168a67/mmedit/models/common/partial_conv.py#L10",
    rtol=1e-4,
    atol=1e-4,
)
def partialconv2d(
    features: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    multi_channel: bool = False,
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor | None]:
    """Convolve the valid pixels, and scale up results with few valid pixels under the kernel.

    Parameters
    ----------
    features : (B, C, H, W) float
    mask : (B, C, H, W) float for `multi_channel`, else (B, 1, H, W): 1 for valid pixels, 0 in holes; None if all are
    valid
    weight, bias : (F, C, K, K) and (F,) float
    stride, padding, dilation : settings of the convolution, as in `torch.nn.functional.conv2d`
    multi_channel : True if each channel has a separate mask
    eps : added to the number of valid pixels

    Returns
    -------
    result of the convolution, (B, F, H', W') float, zero without a valid pixel under the kernel; and the new mask,
    (B, F or 1, H', W') float, or None if `mask` is None

    Source: Liu et al. 2018, "Image Inpainting for Irregular Holes Using Partial Convolutions", equations 1 and 2.
    """
    if mask is None:
        return functional.conv2d(features, weight, bias, stride, padding, dilation), None
    with torch.no_grad():
        window = torch.ones_like(weight) if multi_channel else weight.new_ones(1, 1, *weight.shape[2:])
        valid = functional.conv2d(mask, window, None, stride, padding, dilation)
        ratio = window[0].numel() / (valid + eps)
        valid = valid.clamp(0, 1)
        ratio = ratio * valid
    output = functional.conv2d(features * mask, weight, None, stride, padding, dilation) * ratio
    if bias is not None:
        output = (output + bias.view(1, -1, 1, 1)) * valid
    return output, valid
