"""What values are like, in a few numbers that are alike for whatever model a trace keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, prod

import torch

from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.tensor_specs import memory_dtype
from opgrip.traces.values import ValueModel

SAMPLED = 4096
"""Values that are drawn of a model: their mean is off by a sixtieth of their spread."""
SEED = 0

Statistics = Mapping[str, float]


def statistics_of(model: ValueModel, spec: TensorSpec) -> Statistics:
    """Mean, spread, range and shares of values that a model draws, the same ones each time.

    Of complex numbers those of both parts; of booleans the share that is true is the mean.
    """
    generator = torch.Generator().manual_seed(SEED)
    shape = spec.shape if prod(spec.shape) <= SAMPLED else (SAMPLED,)
    if 0 in shape:
        return {}
    try:
        drawn = model.draw(shape, memory_dtype(spec.dtype), generator)
    except (RuntimeError, ValueError, OverflowError, IndexError, NotImplementedError):
        # a stranger's numbers need not fit the tensor
        return {}
    values = (torch.view_as_real(drawn.to(torch.complex128)) if drawn.is_complex() else drawn.double()).reshape(-1)
    finite = values[values.isfinite()]
    shares = {
        "zeros": float((values == 0).double().mean()),
        "nan": float(values.isnan().double().mean()),
        "inf": float(values.isinf().double().mean()),
    }
    if not len(finite):
        return shares
    low, high = (float(bound) for bound in torch.aminmax(finite))
    mean, std = float(finite.mean()), float(finite.std(correction=0))
    return {"mean": mean, "std": std, "low": low, "high": high, **shares}


def changed_statistics(before: Statistics, after: Statistics, tolerance: float) -> dict[str, tuple[float, float]]:
    """The statistics of which the two differ by more than a part of the values' spread, or, of shares, of all."""
    changed = {}
    spread = max(before.get("std", 0.0), after.get("std", 0.0))
    scale = max(spread, 1e-6 * max(abs(before.get("mean", 0.0)), abs(after.get("mean", 0.0))))
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        if one is None or other is None:
            continue
        unit = 1.0 if name in ("zeros", "nan", "inf") else scale
        # ends of a range come from single values
        allowed = tolerance * unit * (10 if name in ("low", "high") else 1)
        if one != other and not (isfinite(one) and isfinite(other) and abs(one - other) <= allowed):
            changed[name] = (one, other)
    return changed
