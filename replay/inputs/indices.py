"""Indices of sparse tensors, made valid after they were drawn: in range, ascending and distinct where they have to be.

A kernel reads memory at them, so none may be left to chance. What was valid stays as it is.
"""

from __future__ import annotations

from math import prod

import torch

MOST_PLACES = 1 << 60
"""Places in a sparse tensor that 64 bits number, with room to compute with."""


def fitting_lengths(lengths: torch.Tensor, most: int, total: int) -> torch.Tensor:
    """Lengths of rows as near to the drawn ones as can be.

    Parameters
    ----------
    lengths : (..., rows) int64
    most : each is at most so long
    total : their sum, for each index of the dimensions before; at most rows * most
    """
    lengths = lengths.clamp(0, most)
    if lengths.numel() == 0:
        return lengths
    have = lengths.sum(-1, keepdim=True)
    room = most - lengths
    # all shorter in proportion, or all empty places fewer in proportion
    shorter = _shrunk(lengths, have, total)
    longer = most - _shrunk(room, room.sum(-1, keepdim=True), lengths.shape[-1] * most - total)
    lengths = torch.where(have > total, shorter, torch.where(have < total, longer, lengths))
    # rounding leaves a few over
    missing = total - lengths.sum(-1, keepdim=True)
    lengths = lengths + _spread(missing.clamp(min=0), most - lengths)
    return lengths - _spread((-missing).clamp(min=0), lengths)


def distinct_in_rows(drawn: torch.Tensor, lengths: torch.Tensor, most: int) -> torch.Tensor:
    """Columns that ascend in each row, without two alike.

    Parameters
    ----------
    drawn : (elements,) int64
    lengths : (rows,) of each row, their sum the number of elements; none longer than `most`
    most : all columns are below it
    """
    if drawn.numel() == 0:
        return drawn
    row = torch.arange(lengths.numel(), device=drawn.device).repeat_interleave(lengths)
    begin = (lengths.cumsum(0) - lengths)[row]
    place = torch.arange(drawn.numel(), device=drawn.device) - begin
    columns = (drawn.remainder(most) + row * most).sort().values - row * most
    # two alike: the second and all that it runs into move on by one
    span = 2 * most
    lifted = columns - place + row * span
    columns = lifted.cummax(0).values - row * span + place
    # at the end there may be no room to move on to
    return torch.minimum(columns, most - lengths[row] + place)


def distinct_places(drawn: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Indices in rising order, without two alike.

    Parameters
    ----------
    drawn : (dimensions, elements) int64, each within its size
    sizes : of the dimensions
    """
    if not sizes or drawn.shape[1] == 0:
        return drawn
    steps = [prod(sizes[place + 1 :]) for place in range(len(sizes))]
    flat = torch.zeros_like(drawn[0])
    for row, step in zip(drawn, steps, strict=True):
        flat += row * step
    flat = distinct_in_rows(flat, torch.tensor([flat.numel()], device=flat.device), prod(sizes))
    return torch.stack([flat // step % size for step, size in zip(steps, sizes, strict=True)])


def _shrunk(lengths: torch.Tensor, have: torch.Tensor, total: int) -> torch.Tensor:
    ends = (lengths.cumsum(-1).double() * (total / have.clamp(min=1).double())).floor().long()
    return ends.diff(dim=-1, prepend=torch.zeros_like(have)).clamp(min=0).minimum(lengths)


def _spread(amount: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """As much of an amount in each place as there is room, from the first on."""
    before = room.cumsum(-1) - room
    return (amount - before).clamp(min=0).minimum(room)
