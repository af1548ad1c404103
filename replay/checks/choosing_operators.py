"""Operators that choose among elements, for which another of several equal elements is correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opgrip.replay.operators.memory import Arguments

LEAVES_EMPTY = frozenset({"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"})
"""Operators whose results for a backward are empty on a CPU without a backward, and of any shape elsewhere."""

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
"""Operators whose results are uninitialized memory."""


@dataclass(frozen=True, slots=True)
class Named:
    """An operator by its parts.

    packet, overload : as in `aten.sort.stable`
    schema : torch's; None if the operator is not registered here
    random : True if torch says that it draws random numbers
    """

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

    def bound(self, arguments: Arguments) -> dict[str, Any]:
        """Return a call's arguments by name, with defaults."""
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
    """Return, by index, what is wrong with each output that may differ by another choice among equal elements; None for
    correct ones.

    Empty for an operator that does not choose. Indices may differ from the reference's if they point at equal elements;
    they must be valid, and distinct if each element is given once.
    """
    position = INDEX_OUTPUT.get(operator.packet, len(reference))
    if operator.schema is None or _stable(operator, arguments) or not len(actual) == len(reference) > position:
        return {}
    if not all(isinstance(part[position], Tensor) for part in (actual, reference)):
        return {}
    bound = operator.bound(arguments)
    ours, theirs = actual[position].cpu(), reference[position].cpu()
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return {}
    reasons: dict[int, str | None] = {position: _RULES.get(operator.packet, _along_dimension)(bound, ours, theirs)}
    if operator.packet == "topk" and not bound.get("sorted", True):
        values, expected_values = actual[0].cpu(), reference[0].cpu()
        pointed = _gathered(bound, ours)
        fine = reasons[1] is None and values.dtype == expected_values.dtype and _equal(values, pointed)
        reasons[0] = None if fine else "values that the indices do not point at"
    return reasons


def _stable(operator: Named, arguments: Arguments) -> bool:
    return bool(operator.bound(arguments).get("stable"))


def _along_dimension(bound: dict[str, Any], ours: Tensor, theirs: Tensor) -> str | None:
    """Indices along a dimension, or into the flattened input."""
    return _pointing(*_source(bound, ours, theirs))


def _each_once(bound: dict[str, Any], ours: Tensor, theirs: Tensor) -> str | None:
    source, dim, ours, theirs = _source(bound, ours, theirs)
    if ours.numel() and bool((ours.sort(dim).values.diff(dim=dim) == 0).any()):
        return "the same index twice"
    return _pointing(source, dim, ours, theirs)


def _any_order(bound: dict[str, Any], ours: Tensor, theirs: Tensor) -> str | None:
    """As for topk, whose results may be in any order if they are not sorted."""
    reason = _each_once(bound, ours, ours)
    if reason is not None or bound.get("sorted", True):
        return reason or _each_once(bound, ours, theirs)
    source, dim, ours, theirs = _source(bound, ours, theirs)
    same = _equal(source.gather(dim, ours).sort(dim).values, source.gather(dim, theirs).sort(dim).values)
    return None if same else "indices of other values"


def _up_to(bound: dict[str, Any], ours: Tensor, theirs: Tensor) -> str | None:
    """As for cummax, whose indices point at elements up to their own position."""
    source, dim, ours, theirs = _source(bound, ours, theirs)
    sizes = [-1 if place == dim else 1 for place in range(ours.dim())]
    if bool((ours > torch.arange(ours.shape[dim]).reshape(sizes)).any()):
        return "indices of later elements"
    return _pointing(source, dim, ours, theirs)


def _in_window(planes: int, bound: dict[str, Any], ours: Tensor, theirs: Tensor) -> str | None:
    """As for max_pool2d_with_indices: indices into each plane, within the pooled window."""
    source = bound["self"].detach().cpu()
    reason = _pointing(source.flatten(-planes), source.dim() - planes, ours.flatten(-planes), theirs.flatten(-planes))
    # windows of adaptive pooling have no sizes of their own
    if reason is not None or "kernel_size" not in bound:
        return reason
    quotient = ours
    for place in range(1, planes + 1):
        quotient, index = quotient // source.shape[-place], quotient % source.shape[-place]
        if not _reached(bound, index, place, planes):
            return "indices outside of the window"
    return None


def _reached(bound: dict[str, Any], index: Tensor, place: int, planes: int) -> bool:
    """Return True if the windows reach the indices along the dimension that is `place` from the last."""

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
    """Return the input, the dimension of the indices, and both indices with that dimension."""
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
    return None if same else "indices of other values"


def _equal(one: Tensor, other: Tensor) -> bool:
    same = one == other
    if one.is_floating_point() or one.is_complex():
        same |= one.isnan() & other.isnan()
    return bool(same.all())


INDEX_OUTPUT = {
    **dict.fromkeys(["argsort", "argmax", "argmin"], 0),
    **dict.fromkeys(["sort", "topk", "max", "min", "kthvalue", "median", "nanmedian", "mode", "cummax", "cummin"], 1),
    **dict.fromkeys([f"{name}_with_indices" for name in ("max_pool2d", "max_pool3d")], 1),
    **dict.fromkeys(["adaptive_max_pool2d", "adaptive_max_pool3d"], 1),
}
"""Operators that return indices of chosen elements, and the index of that output."""

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
