"""Dropout's results, whose elements are one of two numbers each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.checks.schemas import Named
from opgrip.replay.checks.tolerances import Tolerance
from opgrip.replay.operators.calling import Arguments

DROPOUT = frozenset({"dropout", "dropout_", "native_dropout"})


def dropped_otherwise(operator: Named, arguments: Arguments, actual: Sequence[Any], tolerance: Tolerance) -> str | None:
    """Why a result is not what some mask makes of the input: each element either 0 or input / (1 - p)."""
    bound = operator.bound(arguments)
    source, share = bound["input"].detach().cpu(), bound["p"]
    exact = torch.complex128 if source.is_complex() else torch.float64
    result = actual[0].detach().cpu().to(exact)
    scaled = source.to(exact) / (1 - share) if share < 1 else torch.zeros_like(source, dtype=exact)
    mask = actual[1].cpu() if operator.packet == "native_dropout" and isinstance(actual[1], Tensor) else result != 0
    rtol, atol = tolerance.of(source.dtype)
    # the factor is rounded to the dtype too, where the product is
    expected = scaled * mask
    wrong = int(((result - expected).abs() > atol + (rtol + torch.finfo(source.dtype).eps) * expected.abs()).sum())
    return f"{wrong:,} elements are not what the mask makes of the input" if wrong else None
