"""Which of an operator's samples are run: a few that differ in how they call it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

import torch

from opgrip.capture.models.operators.entry import Arguments
from opgrip.traces.schema.arguments import leaves


def spread(samples: Iterable[Arguments]) -> Iterator[Arguments]:
    """Samples in an order whose beginning has all ways to call the operator; single and no elements come last."""
    groups: dict[Hashable, list[Arguments]] = {}
    single: dict[Hashable, list[Arguments]] = {}
    empty: dict[Hashable, list[Arguments]] = {}
    for sample in samples:
        kind = empty if _has_empty(sample) else groups if has_sizes(sample) else single
        kind.setdefault(_form(sample), []).append(sample)
    for table in (groups, single, empty):
        for round_ in zip_longest(*table.values()):
            yield from (sample for sample in round_ if sample is not None)


def _form(sample: Arguments) -> Hashable:
    """What overload a sample calls, as far as its arguments' types tell."""
    args, kwargs = sample
    return (*map(_kind, args), *((name, _kind(value)) for name, value in sorted(kwargs.items())))


def _kind(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dim() == 0, value.dtype, value.layout)
    if isinstance(value, list | tuple):
        return (type(value).__name__, frozenset(map(_kind, value)))
    return value if isinstance(value, bool | str) else type(value).__name__


def has_sizes(sample: Arguments) -> bool:
    """Whether a tensor of a sample has more than one element."""
    return any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in leaves(list(sample)))


def _has_empty(sample: Arguments) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.numel() == 0 for leaf in leaves(list(sample)))
