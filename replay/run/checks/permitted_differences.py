"""Results that may differ from the reference's: random numbers, and another choice among equal elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.operators.memory import Arguments
from opgrip.replay.run.checks.closeness import Plain
from opgrip.replay.run.checks.verdicts import Tolerance

# operators with results for their backward only; without one, they are empty on a CPU, and of any shape elsewhere
LEAVES_EMPTY = frozenset({"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"})

# operators whose results are uninitialized memory
UNINITIALIZED = frozenset(
    {
        *(
            "empty",
            "empty_like",
            "empty_strided",
            "empty_permuted",
            "empty_quantized",
            "new_empty",
            "new_empty_strided",
        ),
        *("_empty_affine_quantized", "_empty_per_channel_affine_quantized"),
        *("resize", "resize_", "resize_as", "resize_as_"),
    }
)

# outputs of attention operators that only their backward reads: state of a random generator, and a placeholder
GENERATOR_OUTPUTS = frozenset({"philox_seed", "philox_offset", "rng_state", "unused"})


@dataclass(frozen=True, slots=True)
class Named:
    packet: str
    overload: str
    schema: Any
    random: bool

    @property
    def leaves_empty(self) -> bool:
        return self.packet in LEAVES_EMPTY

    @property
    def uninitialized(self) -> bool:
        return self.packet in UNINITIALIZED

    def is_random(self, arguments: Arguments) -> bool:
        return self.random and self.bound(arguments).get("dropout_p") != 0

    def is_generator_state(self, output: int) -> bool:
        outputs = self.schema.returns if self.schema is not None else []
        return output < len(outputs) and outputs[output].name in GENERATOR_OUTPUTS

    def bound(self, arguments: Arguments) -> dict[str, Any]:
        args, kwargs = arguments
        declared = self.schema.arguments if self.schema is not None else []
        values = {item.name: item.default_value for item in declared if item.has_default_value()}
        values |= {item.name: value for item, value in zip(declared, args, strict=False)}
        return values | kwargs


def named(function: Callable[..., Any], op: str | None) -> Named | None:
    parts = (op or "").split(".")
    if len(parts) != 3:
        return None
    overload: Any = function
    if not isinstance(overload, torch._ops.OpOverload):
        overload = torch.ops
        for part in parts:
            overload = getattr(overload, part, None)
    if not isinstance(overload, torch._ops.OpOverload):
        return Named(parts[1], parts[2], None, False)
    return Named(parts[1], parts[2], overload._schema, torch.Tag.nondeterministic_seeded in overload.tags)


Chosen = Callable[[dict[str, Any], Tensor, Tensor], str | None]


def chosen_otherwise(
    operator: Named, arguments: Arguments, actual: Sequence[Any], reference: Sequence[Any]
) -> dict[int, str | None]:
    """Return the error, or None, of each checked output of an operator that may choose one of equal elements."""
    position = INDEX_OUTPUT.get(operator.packet, len(reference))
    if operator.schema is None or not len(actual) == len(reference) > position:
        return {}
    bound = operator.bound(arguments)
    if bound.get("stable") or not all(isinstance(part[position], Tensor) for part in (actual, reference)):
        return {}
    ours, theirs = actual[position].cpu(), reference[position].cpu()
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return {}
    reasons: dict[int, str | None] = {position: _RULES.get(operator.packet, _along_dimension)(bound, ours, theirs)}
    if operator.packet == "topk" and not bound.get("sorted", True):
        values, expected_values = actual[0].cpu(), reference[0].cpu()
        pointed = _gathered(bound, ours)
        fine = reasons[1] is None and values.dtype == expected_values.dtype and _equal(values, pointed)
        reasons[0] = None if fine else "values that differ from those at the returned indices"
    return reasons


def _along_dimension(bound: dict[str, Any], ours: Tensor, theirs: Tensor) -> str | None:
    return _pointing(*_source(bound, ours, theirs))


def _each_once(bound: dict[str, Any], ours: Tensor, theirs: Tensor) -> str | None:
    source, dim, ours, theirs = _source(bound, ours, theirs)
    if ours.numel() and bool((ours.sort(dim).values.diff(dim=dim) == 0).any()):
        return "the same index twice"
    return _pointing(source, dim, ours, theirs)


def _any_order(bound: dict[str, Any], ours: Tensor, theirs: Tensor) -> str | None:
    reason = _each_once(bound, ours, ours)
    if reason is not None or bound.get("sorted", True):
        return reason or _each_once(bound, ours, theirs)
    source, dim, ours, theirs = _source(bound, ours, theirs)
    same = _equal(source.gather(dim, ours).sort(dim).values, source.gather(dim, theirs).sort(dim).values)
    return None if same else "indices of elements with other values"


def _up_to(bound: dict[str, Any], ours: Tensor, theirs: Tensor) -> str | None:
    source, dim, ours, theirs = _source(bound, ours, theirs)
    sizes = [-1 if place == dim else 1 for place in range(ours.dim())]
    if bool((ours > torch.arange(ours.shape[dim]).reshape(sizes)).any()):
        return "an index of an element after its own position"
    return _pointing(source, dim, ours, theirs)


def _in_window(planes: int, bound: dict[str, Any], ours: Tensor, theirs: Tensor) -> str | None:
    source = bound["self"].detach().cpu()
    reason = _pointing(source.flatten(-planes), source.dim() - planes, ours.flatten(-planes), theirs.flatten(-planes))
    # adaptive pooling has no window sizes
    if reason is not None or "kernel_size" not in bound:
        return reason
    quotient = ours
    for place in range(1, planes + 1):
        quotient, index = quotient // source.shape[-place], quotient % source.shape[-place]
        if not _reached(bound, index, place, planes):
            return "indices outside of the pooling window"
    return None


def _reached(bound: dict[str, Any], index: Tensor, place: int, planes: int) -> bool:
    def read_setting(name: str) -> int:
        values = list(bound.get(name) or bound["kernel_size"])
        return int((values * planes if len(values) == 1 else values)[-place])

    starts = torch.arange(index.shape[-place]) * read_setting("stride")
    padding = list(bound["padding"])
    starts = starts - (padding * planes if len(padding) == 1 else padding)[-place]
    within = index - starts.reshape([-1] + [1] * (place - 1))
    dilation = read_setting("dilation")
    return bool(((within >= 0) & (within < dilation * read_setting("kernel_size")) & (within % dilation == 0)).all())


def _source(bound: dict[str, Any], ours: Tensor, theirs: Tensor) -> tuple[Tensor, int, Tensor, Tensor]:
    source = bound["self"].detach().cpu()
    dim = bound.get("dim")
    if dim is None or not source.dim():
        return source.flatten(), 0, ours.flatten(), theirs.flatten()
    dim %= source.dim()
    if ours.dim() < source.dim():
        return source, dim, ours.unsqueeze(dim), theirs.unsqueeze(dim)
    return source, dim, ours, theirs


def _gathered(bound: dict[str, Any], indices: Tensor) -> Tensor:
    source, dim, indices, _ = _source(bound, indices, indices)
    return source.gather(dim, indices)


def _pointing(source: Tensor, dim: int, ours: Tensor, theirs: Tensor) -> str | None:
    if bool(((ours < 0) | (ours >= source.shape[dim])).any()):
        return "indices beyond the input"
    same = _equal(source.gather(dim, ours), source.gather(dim, theirs))
    return None if same else "indices of elements with other values"


def _equal(one: Tensor, other: Tensor) -> bool:
    same = one == other
    if one.is_floating_point() or one.is_complex():
        same |= one.isnan() & other.isnan()
    return bool(same.all())


# operators that return the indices of chosen elements, with the position of this output
INDEX_OUTPUT = {
    **dict.fromkeys(["argsort", "argmax", "argmin"], 0),
    **dict.fromkeys(["sort", "topk", "max", "min", "kthvalue", "median", "nanmedian", "mode", "cummax", "cummin"], 1),
    **dict.fromkeys([f"{name}_with_indices" for name in ("max_pool2d", "max_pool3d")], 1),
    **dict.fromkeys(["adaptive_max_pool2d", "adaptive_max_pool3d"], 1),
}

_RULES: dict[str, Chosen] = {
    "sort": _each_once,
    "argsort": _each_once,
    "topk": _any_order,
    "cummax": _up_to,
    "cummin": _up_to,
    "max_pool2d_with_indices": partial(_in_window, 2),
    "max_pool3d_with_indices": partial(_in_window, 3),
    "adaptive_max_pool2d": partial(_in_window, 2),
    "adaptive_max_pool3d": partial(_in_window, 3),
}


DROPOUT = frozenset({"dropout", "dropout_", "native_dropout"})


def dropped_otherwise(operator: Named, arguments: Arguments, actual: Sequence[Any], tolerance: Tolerance) -> str | None:
    bound = operator.bound(arguments)
    source, share = bound["input"].detach().cpu(), bound["p"]
    exact = torch.complex128 if source.is_complex() else torch.float64
    result = actual[0].detach().cpu().to(exact)
    scaled = source.to(exact) / (1 - share) if share < 1 else torch.zeros_like(source, dtype=exact)
    mask = actual[1].cpu() if operator.packet == "native_dropout" and isinstance(actual[1], Tensor) else result != 0
    rtol, atol = tolerance.of(source.dtype)
    # the factor is rounded to the dtype too, and not only the product
    expected = scaled * mask
    wrong = int(((result - expected).abs() > atol + (rtol + torch.finfo(source.dtype).eps) * expected.abs()).sum())
    return f"{wrong:,} elements differ from the masked input" if wrong else None


RUNS = 32  # number of runs of the reference for a random result
MOST_RUNS = 256  # maximum number of runs, used for results with few elements
POOLED = 4096  # number of elements, over all runs, above which more runs are not worth their time
POSITIONS = 1 << 16  # number of evenly spaced elements that are tested in a result
FRACTION = 1 << 16  # relative precision in which random numbers are compared
FALSE_ALARM = 1e-7  # probability that a test rejects a correct result
COMPARED = 8  # number of reference runs that are compared with the other runs
DEPENDENT = 2.0  # allowed distance of a result, relative to the distance of the reference's runs from each other


def drawn_otherwise(actual: Plain, runs: Sequence[Plain]) -> str | None:
    """Return why the random result `actual` is not distributed like the reference's runs, or None if all tests pass."""
    ours, theirs = _real(actual), torch.stack([_real(run) for run in runs])
    for name, is_special in (("NaN", torch.isnan), ("infinity", torch.isinf)):
        if bool(is_special(ours).any()) and not bool(is_special(theirs).any()):
            return f"{name}, but the reference has numbers"
    ours, theirs = ours.nan_to_num(torch.inf, torch.inf), theirs.nan_to_num(torch.inf, torch.inf)
    first = _sorted(runs[0])
    has_same_numbers = all(torch.equal(_sorted(run), first) for run in runs[1:])
    if has_same_numbers and not torch.equal(_sorted(actual), first):
        return "not a permutation of the reference's output"
    if _constant(ours, theirs):
        return "the same number in all elements, although the reference's elements differ"
    bound = sqrt(log(4 / FALSE_ALARM) / 2) * (1 / sqrt(max(len(ours), 1)) + 1 / sqrt(max(theirs.numel(), 1)))
    if _farther(_two_sample, ours, theirs, bound):
        return "its numbers have a different distribution than the reference's"
    if _farther(_ranks, ours, theirs, sqrt(log(2 / FALSE_ALARM) / (2 * max(len(ours), 1)))):
        return "the distribution of its numbers over the positions differs from the reference's"
    return None


def runs_wanted(elements: int) -> int:
    return min(max(RUNS, POOLED // max(elements, 1)), MOST_RUNS)


def _real(result: Plain) -> Tensor:
    values = result.values[:: max(1, len(result.values) // POSITIONS)]
    real = (torch.view_as_real(values).flatten() if values.is_complex() else values).double()
    if not result.numeric:
        return real
    # equal numbers may have been rounded otherwise
    fraction, exponent = torch.frexp(real)
    return torch.ldexp((fraction * FRACTION).round() / FRACTION, exponent)


def _sorted(result: Plain) -> Tensor:
    return (torch.view_as_real(result.values) if result.values.is_complex() else result.values).flatten().sort().values


def _constant(ours: Tensor, theirs: Tensor) -> bool:
    # the probability of m equal elements is at most p**(m - 1), if p is the share of the most common number
    if len(ours) < 2 or bool((ours != ours[0]).any()) or bool((theirs == theirs[:, :1]).all(1).any()):
        return False
    commonest = int(theirs.unique(return_counts=True)[1].max()) / theirs.numel()
    doubt = sqrt(log(2 / FALSE_ALARM) / (2 * theirs.numel()))
    return bool(min(commonest + doubt, 1.0) ** (len(ours) - 1) < FALSE_ALARM)


def _farther(distance: Callable[[Tensor, Tensor], float], ours: Tensor, theirs: Tensor, bound: float) -> bool:
    if not len(ours):
        return False
    distance_to_runs = distance(ours, theirs)
    if distance_to_runs <= bound:
        return False
    among = (
        distance(theirs[one], torch.cat([theirs[:one], theirs[one + 1 :]])) for one in range(min(len(theirs), COMPARED))
    )
    return distance_to_runs > DEPENDENT * max(among)


def _two_sample(ours: Tensor, theirs: Tensor) -> float:
    one, others = ours.sort().values, theirs.flatten().sort().values
    places = torch.cat([one, others])
    below = torch.searchsorted(one, places, right=True).double() / len(one)
    return float((below - torch.searchsorted(others, places, right=True) / len(others)).abs().max())


def _ranks(ours: Tensor, theirs: Tensor) -> float:
    runs = len(theirs)
    tied = (theirs == ours).sum(0)
    chance = torch.rand(len(ours), generator=torch.Generator().manual_seed(0))
    rank = (theirs < ours).sum(0) + (chance * (tied + 1)).long().clamp_max(tied)
    share = torch.bincount(rank, minlength=runs + 1).double().cumsum(0) / len(ours)
    return float((share - torch.arange(1, runs + 2) / (runs + 1)).abs().max())
