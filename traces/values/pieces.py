"""Some thousand elements of a tensor, in short pieces from all of it: shares and neighbours are as in the whole."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)

MOST = 4096
"""Elements in all pieces; a tensor of no more is looked at whole."""
LENGTH = 256
"""Elements of a piece."""
FEWEST_ROWS = 4
"""Of rows so long that all elements are in one."""
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples are spread evenly and meet no period."""


def pieces(tensor: torch.Tensor, whole_rows: bool = False) -> torch.Tensor:
    """Pieces (R, C) in row-major order: rows along the last dimension, or parts of rows that are longer than a piece.

    Parameters
    ----------
    tensor : strided, of more than `MOST` elements
    whole_rows : fewer of them where they are long
    """
    if whole_rows and tensor.numel() <= FEWEST_ROWS * tensor.shape[-1]:
        return tensor
    offsets, extent = _offsets(tuple(tensor.shape), tensor.stride(), whole_rows)
    return tensor.as_strided((extent,), (1,))[offsets]


def every_so_many(values: NDArray[Number], most: int) -> NDArray[Number]:
    """At most so many elements (N,), at equal distances; a view."""
    # an odd distance: every second element of interleaved pairs would be one of the two alone
    return values if len(values) <= most else values[:: -(-len(values) // most) | 1]


@lru_cache(maxsize=128)
def _offsets(shape: tuple[int, ...], stride: tuple[int, ...], whole_rows: bool) -> tuple[torch.Tensor, int]:
    """Places (R, C) of the elements in memory after the first, and how much memory these reach over."""
    columns, rows = shape[-1], int(np.prod(shape[:-1], dtype=np.int64))
    height, width = max(1, LENGTH // columns), columns if whole_rows else min(columns, LENGTH)
    count = max(min(rows, FEWEST_ROWS), MOST // (height * width))
    if width == columns:
        row = (_starts(count, rows, height)[:, None] + np.arange(height)).reshape(-1)
        column = np.zeros_like(row)
    else:
        row, column = np.divmod(_starts(count, rows * columns, width), columns)
        column = np.minimum(column, columns - LENGTH)
    row_offsets = column * stride[-1]
    for place, step in zip(np.unravel_index(row, shape[:-1]) if len(shape) > 1 else (), stride[:-1], strict=True):
        row_offsets = row_offsets + place * step
    offsets = row_offsets[:, None] + np.arange(width) * stride[-1]
    return torch.from_numpy(offsets), int(offsets.max()) + 1


def _starts(count: int, total: int, length: int) -> NDArray[np.int64]:
    """Where so many pieces of this length begin that lie apart, one in each part of as many."""
    parts, size = np.arange(count), total / count
    return np.floor(parts * size + parts * GOLDEN % 1 * max(0.0, size - length)).astype(np.int64)
