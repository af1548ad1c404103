"""Tests of the memory that a replay holds: of the case that runs, and not of all cases around it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from foreign_data import case_files, needs_cases

from opgrip.capture import Capture
from opgrip.replay.cases.cases import Case
from opgrip.replay.inputs import filling
from opgrip.replay.operators.memory import bytes_of, with_memory
from opgrip.replay.replay_options import request_with
from opgrip.replay.results.results import OK
from opgrip.replay.run.preparation import Prepared, prepare
from opgrip.replay.run.workload import Workload, load_workload

# program that prints the peak memory of a command's largest process, in bytes; the tests' own process cannot start the
# command, because the kernel counts the peak of a process for the commands that it starts
PEAK_OF_CHILDREN = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


@pytest.mark.slow
@needs_cases
def test_replay_of_a_server_takes_at_most_twice_the_memory_of_its_largest_case(tmp_path: Path) -> None:
    (profile,) = case_files("tracelens/inference_sglang_decode_capture_traces_bs_32_rank0.json.gz")
    options = ("--device", "cpu", "--top", "15", "--iterations", "1", "--warmup", "0", "-o", "r.json")
    command = [sys.executable, "-c", PEAK_OF_CHILDREN, sys.executable, "-m", "opgrip.replay", profile, *options]
    peak = int(subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()[-1])
    rows = json.loads((tmp_path / "r.json").read_text())["results"]
    assert len(rows) == 15
    largest_bytes = max(row["bytes_in"] + row["bytes_out"] for row in rows)
    assert largest_bytes > 1 << 30
    assert peak <= 2 * largest_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.complex64])
def test_values_of_large_tensors_are_drawn_in_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def filled() -> torch.Tensor:
        tensor = torch.empty(1 << 10, 1 << 10, dtype=dtype)
        filling.fill(tensor, None, torch.Generator().manual_seed(0), dtype)
        return tensor

    whole = filled()
    monkeypatch.setattr(filling, "BLOCK", 1 << 14)
    tensor, memory = with_memory(filled, "cpu")
    assert torch.equal(tensor.view(torch.uint8), whole.view(torch.uint8))
    assert memory.peak <= tensor.nbytes + (1 << 19)


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
