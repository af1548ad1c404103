import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, window: tuple[int, int], heads: int) -> Arguments:
    rows = (2 * window[0] - 1) * (2 * window[1] - 1)
    return draw.normal(rows, heads, std=0.02, grad=True), window


@sample(
    inputs,
    {
        "Swin-T, training, first stage": ((7, 7), 3),
        "Swin-T, training, last stage": ((7, 7), 24),
        "Swin-L, 384x384, training, last stage": ((12, 12), 48),
    },
    tags="AdvancedIndexing Broadcast ViewAttribute",
    project="Swin Transformer",
    url="https://arxiv.org/abs/2103.14030",
)
def relative_position_bias(table: Tensor, window: tuple[int, int]) -> Tensor:
    """Return the entries of a table for the offset in rows and columns between all positions of a window.

    Parameters
    ----------
    table : ((2 * H - 1) * (2 * W - 1), heads) float
    window : H and W

    Returns (heads, H * W, H * W) float, queries and keys
    Source: Liu et al. 2021, "Swin Transformer", equation 4.
    """
    height, width = window
    positions = torch.arange(height * width, device=table.device)
    down = positions.div(width, rounding_mode="floor")
    across = positions.remainder(width)
    rows = down[:, None] - down[None, :] + height - 1
    columns = across[:, None] - across[None, :] + width - 1
    entries = (rows * (2 * width - 1) + columns).flatten()
    bias = table[entries].view(height * width, height * width, -1)
    return bias.permute(2, 0, 1).contiguous()
