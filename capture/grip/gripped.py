"""What was gripped: a function, and the calls of it that were kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GrippedCall:
    """One call of a gripped function.

    Attributes
    ----------
    args, kwargs : as they were before the call: tensors copied (strides and requires_grad kept), containers and
        objects copied
    results : what it returned, copied
    after : the arguments after the call, where it wrote into them
    random_state : torch's CPU generator before the call, where the call drew from it
    operators : how many operators it launched
    operator_ns : their time
    duration_ns : the call's time
    settings : torch's settings that it ran under, as a trace's contexts have them, and autocast: `cpu:bfloat16`
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any
    after: tuple[tuple[Any, ...], dict[str, Any]] | None
    random_state: Tensor | None
    operators: int
    operator_ns: int
    duration_ns: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gripped:
    """A function and its calls.

    Attributes
    ----------
    function : the original, unwrapped by us
    owner : the class, for methods
    entry : "delta2bbox", "Coder.decode"
    name : of the sample
    tags : the words of `opgrip.samples.tags.Tag`
    by_reference : keep the import path instead of the code
    """

    function: Callable[..., Any]
    owner: type | None
    entry: str
    name: str
    tags: frozenset[str]
    calls: Sequence[GrippedCall]
    by_reference: bool = False
