"""An operator that sample calls can be made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""

FORWARD, IN_PLACE = "forward", "in place"


@dataclass(frozen=True, slots=True)
class Entry:
    """What can be called with sample inputs.

    Attributes
    ----------
    name : as torch's table calls it: `add`, `nn.functional.relu`, `optim.Adam`; `my_ops.scale.default` of a registered
        operator
    categories : that it belongs to
    function : what is called
    in_place : the variant that writes into its first argument; None where there is none
    dtypes : of its arguments that a device has
    differentiable : those of them that it has gradients for
    samples : arguments on a device of a dtype, which may want gradients; drawn from torch's, numpy's and Python's
        generators
    """

    name: str
    categories: frozenset[str]
    function: Callable[..., Any]
    dtypes: Callable[[str], tuple[torch.dtype, ...]]
    differentiable: Callable[[str], frozenset[torch.dtype]]
    samples: Callable[[str, torch.dtype, bool], Iterator[Arguments]]
    in_place: Callable[..., Any] | None = None
