"""What a mode gives is held against eager: rounding, chance and choices among equals are right, all else is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_calls import CALLS, KEYWORDS
from torch import Tensor

from opgrip.replay.checks import Reference, Tolerance, Verdict, observe
from opgrip.replay.modes.mode import Results
from opgrip.traces.arguments import map_leaves

aten = torch.ops.aten


def made(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    """What gives copies of arguments."""

    def fresh(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) else leaf

    return lambda: (map_leaves(fresh, args), map_leaves(fresh, kwargs))


def reference(function: Any, *args: Any, mutates: bool = False, **kwargs: Any) -> Reference:
    op = str(function) if isinstance(function, torch._ops.OpOverload) else None
    return Reference(function, made(*args, **kwargs), mutates, op)


def checked(function: Any, *args: Any, met: Any, mutates: bool = False, **kwargs: Any) -> Verdict:
    """The verdict over results `met`, or over those of another function."""
    if callable(met):
        met = observe(met, made(*args, **kwargs)(), mutates)
    elif not isinstance(met, Results):
        met = Results(list(met) if isinstance(met, list | tuple) else [met])
    return reference(function, *args, mutates=mutates, **kwargs).check(met, Tolerance())


@pytest.mark.parametrize("name", CALLS)
def test_what_a_compiler_gives_is_right(name: str) -> None:
    function, args = CALLS[name]
    kwargs = KEYWORDS.get(name, {})
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args, **kwargs: function(*args, **kwargs), backend="aot_eager_decomp_partition")
    verdict = checked(function, *args, met=compiled, **kwargs)
    assert verdict.right, verdict.reason
