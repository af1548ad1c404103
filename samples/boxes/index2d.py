import torch
from torch import Tensor

from opgrip.samples.sample import Arguments, Draw, sample


def inputs(draw: Draw, rows: int, columns: int) -> Arguments:
    source = draw.uniform(rows, columns)
    return source, source.argsort(dim=1, descending=True)


@sample(
    inputs,
    {
        "YOLACT, sizes of Fast NMS in the paper: 80 classes, 200 candidates": (80, 200),
        "YOLACT, sizes of the paper: 80 classes, 19248 priors": (80, 19248),
    },
    tags="ViewAttribute Broadcast AdvancedIndexing",
    url="https://github.com/dbolya/yolact/blob/57b8f2d95e62e2e649b382f516ab41f949b57239/layers/box_utils.py#L376",
)
def index2d(src: Tensor, idx: Tensor) -> Tensor:
    """Return `src[i, idx[i, j]]` for all i and j.

    Parameters
    ----------
    src : (R, C) any dtype
    idx : (R, C) int64, 0 to C - 1

    Returns (R, C), dtype of `src`
    Source: Bolya et al. 2019 (YOLACT), `layers/box_utils.py`.
    """
    rows, columns = idx.shape
    starts = torch.arange(rows, device=idx.device)[:, None] * columns
    return src.reshape(-1)[(idx + starts).reshape(-1)].reshape(rows, columns)
