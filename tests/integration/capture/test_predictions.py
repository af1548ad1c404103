"""Tests of predicted calls, which must be recorded exactly as calls that are examined individually."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opgrip.capture import Capture
from opgrip.capture.signatures import predictions
from opgrip.capture.torch_compat.torch_private import arguments_check
from opgrip.traces import load

BASE = torch.arange(24.0).reshape(4, 6)
OTHER = torch.arange(24.0).reshape(4, 6)

CALLS: dict[str, Callable[[], Any]] = {
    "integer": lambda: BASE * 2,
    "float": lambda: BASE * 2.0,
    "bool": lambda: BASE * True,
    "zero": lambda: BASE.clamp(min=0.0),
    "minus zero": lambda: BASE.clamp(min=-0.0),
    "nan": lambda: BASE.clamp(min=float("nan")),
    "left": lambda: BASE[:, :2] + OTHER[:, :2],
    "right": lambda: BASE[:, 2:4] + OTHER[:, :2],
    "itself": lambda: BASE[:, :2] + BASE[:, :2],
    "its other half": lambda: BASE[:, :2] + BASE[:, 2:4],
    "list": lambda: torch.cat([BASE, OTHER]),
    "list of one storage": lambda: torch.cat([BASE, BASE]),
    "three": lambda: torch.addmm(OTHER[0], BASE[:, :4], OTHER),
    "keyword": lambda: torch.sum(BASE, dim=0, dtype=torch.float64),
    "other keyword": lambda: torch.sum(BASE, dim=0, dtype=torch.float32),
    "in place": lambda: OTHER.add_(0.0),
    "scalars": lambda: torch._foreach_add([BASE, OTHER], [1, 2.0]),
    "other scalars": lambda: torch._foreach_add([BASE, OTHER], [1.0, 2.0]),
    "conjugate": lambda: BASE.to(torch.complex64).conj() * 2,
    "no conjugate": lambda: BASE.to(torch.complex64) * 2,
    "gradients": lambda: BASE.detach().requires_grad_() * 2,
    "inference": lambda: torch.inference_mode()(lambda: BASE * 2)(),
}


def recorded(path: Path, names: list[str]) -> list[tuple[str, str]]:
    with Capture(path, force=True):
        for name in names:
            CALLS[name]()
    trace = load(path, partial=False)
    assert not trace.end.dropped  # type: ignore[union-attr]
    by_number = {item.number: repr((item.args, item.kwargs, item.outputs)) for item in trace.signatures}
    return [(row.op, by_number[row.signature]) for row in trace.calls.itertuples()]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=6))
def test_predicted_calls_have_the_same_signatures_as_examined_ones(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = names * 24
    foreseen = recorded(tmp_path / "t.jsonl", program)
    with monkeypatch.context() as patch:
        patch.setattr(predictions, "arguments_check", lambda args, typed_lists: None)
        assert recorded(tmp_path / "t.jsonl", program) == foreseen


def test_arguments_check_keeps_no_tensor_alive() -> None:
    import weakref

    x = torch.ones(3)
    check = arguments_check((x, 1, [x]))
    assert check is not None
    alive = weakref.ref(x)
    del x
    assert alive() is None


@pytest.mark.parametrize("other", [(1, True), (1, 1.0), (0.0, -0.0), ([1, 2], [1, True]), (None, 0), ((1,), [1])])
def test_arguments_check_distinguishes_values_that_compare_equal(other: tuple[Any, Any]) -> None:
    this, that = other
    check = arguments_check((this,))
    assert check is not None
    assert check((this,))
    assert not check((that,))
