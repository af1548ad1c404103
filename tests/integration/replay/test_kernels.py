"""Tests of the columns of kernels in a replay, with the records of `kernel_records` and of an H200."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_records import DURATIONS, Event, ProfileOnCpu
from programs import ROOT
from settings import rows_of, settings_of

from opgrip.capture import Capture
from opgrip.platform import activity_records
from opgrip.platform.activity_records import LaunchedWork, launched_by
from opgrip.replay.cases.cases import make_cases
from opgrip.replay.operators import devices
from opgrip.replay.reports.cells import to_frame
from opgrip.replay.results.results import OK, RAN, Result
from opgrip.replay.run import measure
from opgrip.replay.run.kernels import KernelColumns, kernel_columns, with_kernels
from opgrip.traces import load

# records of five runs of each call, by torch 2.11: name, device type, begin and duration in ns, correlation number
H200 = ROOT / "tests/support/fakes/h200_records.json"


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "records_work", lambda device: True)
    monkeypatch.setattr(activity_records, "ActivityProfile", ProfileOnCpu)


def replay_calls(folder: Path, call: Callable[[], object], **options: Any) -> list[Result]:
    with Capture(folder / "t.jsonl"):
        call()
    rows = rows_of(make_cases(load(folder / "t.jsonl")), settings_of(**({"iterations": 5} | options)))
    assert all(row.status in RAN for row in rows), rows
    return rows


@pytest.mark.parametrize("options", [{}, {"cache": "cold"}, {"exec_mode": "continuous"}, {"mode": "eager,jit"}])
def test_row_has_the_kernels_of_one_run(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_on_cpu(monkeypatch)
    x = torch.ones(9)
    rows = replay_calls(tmp_path, lambda: (x.sin(), x.view(3, 3)), **options)
    columns = {(row.op, row.mode): KernelColumns.of(row) for row in rows}
    for (op, _), own in columns.items():
        if op == "aten.sin.default":
            assert own == KernelColumns(1, 1, DURATIONS["aten::sin"] / 1e3, 0.0, False, "aten::sin_kernel x1")
        else:
            assert own == KernelColumns(0, 0, 0.0, 0.0, False, "")
    assert len(columns) == len(rows) == 2 * len(options.get("mode", "eager").split(","))
    assert to_frame(rows)["gpu_us"].tolist() == [KernelColumns.of(row).gpu_us for row in rows]


def test_failing_profile_loses_only_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ProfileOnCpu) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    record_on_cpu(monkeypatch)
    monkeypatch.setattr(ProfileOnCpu, "start", fail)
    x = torch.ones(9)
    [row] = replay_calls(tmp_path, lambda: x.sin())
    assert row.median_us
    assert row.added == {}


def records_of(call: str) -> list[LaunchedWork]:
    """Return the work of five runs on an H200; torch 2.11's records have no activity type."""
    rows = json.loads(H200.read_text(encoding="utf-8"))[call]
    kinds = {"CPU": "cuda_runtime", "CUDA": "kernel"}
    return launched_by(
        [Event(kinds[device], number, name, at, duration) for name, device, at, duration, number in rows]
    )


@pytest.mark.parametrize(
    ("call", "each", "gpu_us", "gap_us", "is_bound"),
    [
        ("one_add", 1, 0.928, 0.0, False),
        ("one_sort", 14, 259.98, 22.35, False),
        ("one_nonzero", 6, 23.454, 46.21, True),
    ],
)
def test_columns_are_computed_from_h200_records(
    call: str, each: int, gpu_us: float, gap_us: float, is_bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity_records, "_has_activity_type", False)
    work = sorted(records_of(call), key=lambda item: item.launch)
    assert len(work) == 5 * each
    # as in a replay, without the first run
    own = kernel_columns([work[place : place + each] for place in range(each, 5 * each, each)])
    assert (own.kernels, own.launches, own.launch_bound) == (each, each, is_bound)
    assert own.gpu_us == pytest.approx(gpu_us, abs=0.01)
    assert own.launch_gap_us == pytest.approx(gap_us, abs=0.01)


def test_work_on_several_streams_and_in_a_graph_is_counted() -> None:
    """Overlapping work keeps a device busy once, and a graph's kernels have one launch, before any gap."""
    side = [LaunchedWork("a", 0, 0, 50, 1, 5, 100), LaunchedWork("b", 0, 10, 50, 2, 15, 120)]
    graph = [LaunchedWork("c", 0, 0, 10, 3, 125, start) for start in (100, 130, 200)]
    # a launch that began before the device was idle, but returned later
    late = [LaunchedWork("d", 0, 0, 10, 4, 90, 100), LaunchedWork("d", 0, 105, 10, 5, 145, 150)]
    columns = [kernel_columns([run]) for run in (side, graph, late)]
    assert [(own.launches, own.gpu_us, own.launch_gap_us, own.launch_bound) for own in columns] == [
        (2, 0.07, 0.0, False),
        (1, 0.03, 0.08, False),
        (2, 0.02, 0.04, True),
    ]
    assert [own.kernel_names for own in columns] == ["a x1; b x1", "c x3", "d x2"]


def test_rows_have_shares_of_their_gpus_datasheet(monkeypatch: pytest.MonkeyPatch) -> None:
    run = [LaunchedWork("gemm", 0, 0, 200_000, 1, 5, 100)]
    row = Result(0, "aten.mm.default", "", 1, 1.0, "eager", "cuda:0", OK, 1.0, 1.0, median_us=250.0)
    row = replace(row, flops=int(67e12 * 100e-6), bytes_moved=int(4.8e12 * 50e-6), math_dtype="float32")
    monkeypatch.setattr(devices, "name_of", lambda device: "NVIDIA H200")
    shares = [
        (own.of_peak_rate, own.of_peak_bandwidth)
        for own in (
            KernelColumns.of(with_kernels(with_dtype, [run], context))
            for with_dtype, context in (
                (row, {}),
                (row, {"matmul_precision": "high"}),
                (replace(row, math_dtype="float8_e4m3fn"), {}),
                (replace(row, math_dtype="complex64"), {}),
            )
        )
    ]
    rates = [0.5, 0.5 * 67 / 494.5, 0.5 * 67 / 1979, None]
    assert shares == [(pytest.approx(rate), pytest.approx(0.25)) for rate in rates]
    monkeypatch.setattr(devices, "name_of", lambda device: "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    assert KernelColumns.of(with_kernels(row, [run], {})).of_peak_rate is None
