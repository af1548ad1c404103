"""Tests of the memory that a case needs, relative to its arguments."""

from __future__ import annotations

import pytest
import torch

from opgrip.capture import Capture
from opgrip.replay.cases.cases import Case
from opgrip.replay.operators.memory import bytes_of, with_memory
from opgrip.replay.replay_options import request_with
from opgrip.replay.results.results import OK
from opgrip.replay.run.preparation import Prepared, prepare
from opgrip.replay.run.workload import Workload, load_workload

ELEMENTS = 1 << 23


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Return the calls of a program that write into large arguments."""
    path = tmp_path_factory.mktemp("memory") / "writes.jsonl"
    tensors = [torch.rand(ELEMENTS) for _ in range(5)]
    with Capture(path), torch.no_grad():
        tensors[0].add_(tensors[1])
        rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        first, second, third, fourth, _ = ([tensor] for tensor in tensors)
        torch._fused_adamw_(first, second, third, fourth, [], [torch.ones(())], **rates, amsgrad=False, maximize=False)
    return load_workload(request_with(str(path)))


@pytest.mark.parametrize("op", ["aten.add_.Tensor", "aten._fused_adamw_.default"])
def test_mutating_call_needs_its_arguments_twice(workload: Workload, op: str) -> None:
    case = next(case for case in workload.cases if case.op == op)
    needed, rows = peak_of(case, workload)
    assert [row.status for _, row, _ in rows] == [OK]
    arguments = bytes_of([case.signature.args, case.signature.kwargs])
    assert arguments >= 2 * ELEMENTS * 4
    assert needed <= 2.1 * arguments


def test_mutating_call_with_a_reference_mode_needs_bounded_memory(workload: Workload) -> None:
    workload = workload.with_request(modes=request_with("none.jsonl", mode=["jit"]).modes)
    case = next(case for case in workload.cases if case.op == "aten.add_.Tensor")
    needed, rows = peak_of(case, workload)
    assert {row.status for _, row, _ in rows} == {OK}
    # eager and jit are prepared together; the reference keeps what it computed
    assert needed <= 8 * 2 * ELEMENTS * 4


def peak_of(case: Case, workload: Workload) -> tuple[int, list[Prepared]]:
    rows, memory = with_memory(lambda: prepare(case, workload), "cpu")
    return memory.peak, rows


def test_runs_of_a_prepared_call_start_with_the_same_values(workload: Workload) -> None:
    case = next(case for case in workload.cases if case.op == "aten.add_.Tensor")
    ((_, _, timed_function),) = prepare(case, workload)
    assert timed_function is not None
    (first, *_), _ = timed_function.ready(1)[0]
    before = first.clone()
    timed_function.run()
    runs = timed_function.ready(3)
    assert len({args[0].data_ptr() for args, _ in runs}) == 3
    for args, _ in runs:
        torch.testing.assert_close(args[0], before, rtol=0, atol=0)
