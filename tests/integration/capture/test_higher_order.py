"""Tests of operators that take functions: their inner calls are recorded, and results equal those without a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._pytree import tree_leaves

from opgrip.capture import Capture
from opgrip.replay.cases.cases import make_cases
from opgrip.traces import Trace, load

X = torch.linspace(0.1, 1, 12).reshape(4, 3)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def branches() -> Any:
    return torch.cond(X.sum() > 1, lambda x: x.sin() + 1, lambda x: x.cos(), (X,))


def branches_with_gradients() -> Any:
    """Return the gradients of a branch's argument and of a variable that it closes over."""
    x, weight = X.clone().requires_grad_(), torch.full((3,), 2.0, requires_grad=True)
    result = torch.cond(x.sum() > 1, lambda x: x.sin() * weight, lambda x: x.cos(), (x,))
    result.sum().backward()
    return result, x.grad, weight.grad


def loop() -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), X))


def scanned() -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda carry, x: (carry + x, carry * x), torch.zeros(3), X)


def mapped() -> Any:
    from functorch.experimental.control_flow import map as map_rows

    return map_rows(lambda x, y: x.sin() + y, X, torch.ones(3))


def attention() -> Any:
    query, key, value = X.repeat(4, 1)[None, None].repeat(3, 2, 1, 1)[:, None]
    return flex_attention(query, key, value, score_mod=lambda score, b, h, i, j: score + (i - j))


PROGRAMS: list[tuple[Callable[[], Any], str, set[str]]] = [
    (branches_with_gradients, "cond", {"sin", "cos", "mul"}),
    (scanned, "scan", {"add", "mul", "select"}),
    (branches, "cond", {"sin", "add"}),
    (loop, "while_loop", {"lt", "add", "sin"}),
    (mapped, "map_impl", {"sin", "add", "stack"}),
    (attention, "flex_attention", {"sub", "add", "matmul", "_safe_softmax"}),
]
CASES = [
    # torch takes a second to compile each case
    pytest.param(*case, compiled, marks=pytest.mark.slow if compiled == "opaque" or place > 1 else ())
    for compiled in ("operators", "opaque")
    for place, case in enumerate(PROGRAMS)
]


def captured(program: Callable[[], Any], path: Path, **options: Any) -> tuple[Any, Trace]:
    with Capture(path, **options) as capture:
        result = program()
    assert capture.dropped == 0
    return result, load(path, partial=False)


def equal(actual: Any, expected: Any) -> bool:
    pairs = zip(tree_leaves(actual), tree_leaves(expected), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("program", "name", "inner", "compiled"), CASES)
def test_operators_inside_are_recorded_and_results_are_equal(
    tmp_path: Path, program: Callable[[], Any], name: str, inner: set[str], compiled: str
) -> None:
    expected = program()
    actual, trace = captured(program, tmp_path / "t.jsonl", compiled=compiled)
    assert equal(actual, expected)
    calls = trace.calls
    outer = f"torch.ops.higher_order:{name}"
    inside = calls[calls["inside"] == outer]
    assert inner <= {op.split(".")[1] for op in inside["op"]}
    assert inside["gripped"].all()
    assert not inside["file"].str.contains("<").any()
    assert (calls["op"] == outer).sum() == (2 if program is branches_with_gradients else 1)
    # the outer call's time is attributed to its inner calls
    assert outer not in set(trace.own_calls["op"])
    assert set(inside["op"]) <= {case.op for case in make_cases(trace)}


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), lambda x: self.b(x), (x,))
        return result


def test_inner_calls_have_the_module_and_line_of_the_outer_call(tmp_path: Path) -> None:
    model = nn.Sequential(Gate(), nn.Linear(3, 1))

    def program() -> Any:
        model(X).sum().backward()
        return model[0].a.weight.grad

    expected = program().clone()
    model.zero_grad()
    actual, trace = captured(program, tmp_path / "t.jsonl", model=model)
    assert torch.equal(actual, expected)
    inside = trace.calls[trace.calls["inside"].notna()]
    forward = inside[inside["phase"] == "forward"]
    assert set(forward["module"]) == {"0"}
    assert set(forward["function"]) == {"Gate.forward"}
    assert (inside["phase"] == "backward").any()


def test_compiler_state_is_restored_afterwards(tmp_path: Path) -> None:
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph

    captured(branches_with_gradients, tmp_path / "t.jsonl")
    torch.compile(lambda x: x.sin() + 1, backend=backend)(X)
    assert compiled == [1]


def test_error_inside_reaches_the_program_and_the_scope_is_left(tmp_path: Path) -> None:
    def inverse(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x).contiguous()

    def program() -> Any:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"singular|inver"):
                torch.cond(
                    X.sum() > 1, lambda x: torch.linalg.inv(x).contiguous(), lambda x: x.clone(), (torch.zeros(3, 3),)
                )
        return X + 1

    with Capture(tmp_path / "t.jsonl"):
        program()
    trace = load(tmp_path / "t.jsonl")
    last = trace.calls[trace.calls["op"] == "aten.add.Tensor"]
    assert last["inside"].isna().all()
