import torch
from torch import Tensor

from opgrip.samples.sample import sample

RATIOS = (0.5, 1.0, 2.0)
RETINANET = tuple(4.0 * 2 ** (third / 3) for third in range(3))
"""Three scales per octave, starting at four strides."""


@sample(
    lambda draw, base_size, scales: (base_size, torch.tensor(scales), torch.tensor(RATIOS)),
    {
        "Faster R-CNN R50-FPN, P2": (4, (8.0,)),
        "RetinaNet R50-FPN, P3": (8, RETINANET),
        "Faster R-CNN R50-C4": (16, (2.0, 4.0, 8.0, 16.0, 32.0)),
    },
    tags="ViewAttribute Broadcast IfElseBranch",
    url="https://github.com/open-mmlab/mmdetection/blob/4bd4ace53a626659070204236da5b8e14ae9cd08/mmdet/core/anchor/anchor_generator.py#L131",
)
def gen_base_anchors(
    base_size: float,
    scales: Tensor,
    ratios: Tensor,
    scale_major: bool = True,
    center_offset: float = 0.0,
    center: tuple[float, float] | None = None,
) -> Tensor:
    """Return the anchors of the first cell of a feature map, one per ratio and scale.

    Parameters
    ----------
    base_size : side in pixels of the square anchor of scale 1, often equal to the stride
    scales : (S,) float
    ratios : (R,) float, height divided by width
    scale_major : True if scales vary fastest, False if ratios do
    center_offset : offset of the centre from the origin, as a multiple of `base_size`
    center : x and y of the centre in pixels, replaces `center_offset`

    Returns (R * S, 4) float, x1 y1 x2 y2 in pixels
    Source: Ren et al. 2015, section 3.1.1; MMDetection 2, `core.anchor.anchor_generator`.
    """
    x, y = (center_offset * base_size, center_offset * base_size) if center is None else center
    root = ratios.sqrt()
    if scale_major:
        widths = (base_size / root[:, None] * scales[None, :]).view(-1)
        heights = (base_size * root[:, None] * scales[None, :]).view(-1)
    else:
        widths = (base_size * scales[:, None] / root[None, :]).view(-1)
        heights = (base_size * scales[:, None] * root[None, :]).view(-1)
    return torch.stack([x - 0.5 * widths, y - 0.5 * heights, x + 0.5 * widths, y + 0.5 * heights], dim=-1)
