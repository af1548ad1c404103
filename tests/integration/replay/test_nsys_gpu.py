"""Tests of replays on a GPU under Nsight Systems, with reports in the documented schema from a stand-in for nsys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from nsys_reports import HELP, NsysStandIn, write_report
from settings import rows_of, settings_of

from opgrip.cli.progress import Reporter
from opgrip.replay.analyses import AnalysisSession
from opgrip.replay.analyses.nsys import (
    GRAPH_NAME,
    Nsys,
    NsysAnalysis,
    NsysColumns,
    NsysOptions,
    joined,
    profile_rows,
    read_report,
    with_seen,
)
from opgrip.replay.replay_options import request_with
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run.workload import load_workload
from opgrip.replay.timing import subjects
from opgrip.replay.timing.ranges import BEFORE, READY, Range
from opgrip.replay.timing.rounds import NO_ROW

WINDOWS = 12


def row(case: int) -> Result:
    return Result(case, f"aten.op{case}", "", 1, 1.0, "eager", "cuda:0", OK, 0.0, 0.0)


def columns_of(path: Path, case: int = 7) -> NsysColumns:
    runs, _ = joined(read_report(path))
    return NsysColumns.of(with_seen(row(case), None, runs))


def window(path: Path, case: int) -> Path:
    """Write a report of a part of the cases, with times that start from zero."""
    kernel = {"start": 210, "end": 220, "correlationId": 1, "name": f"kernel{case}"}
    return write_report(path, [(200, 300, f"aten.op{case}", case)], [(205, 1)], {"KERNEL": [kernel]})


@pytest.fixture
def windows(tmp_path: Path) -> list[Path]:
    return [window(tmp_path / f"window{case}", case) for case in range(WINDOWS)]


def test_gpu_trace_is_profiled_on_the_gpu_by_default(tiny_trace: Path, tmp_path: Path, windows: list[Path]) -> None:
    stand_in = NsysStandIn(tmp_path / "bin", windows[:1])
    job = request_with(tiny_trace, top=1)
    loaded = load_workload(job)
    # settings of a trace whose tensors were on a GPU
    loaded = replace(loaded, device="cuda:0")
    session = AnalysisSession(loaded, tmp_path / "rows.json", False, False, Reporter("opreplay"))
    assert job.inputs.device is None
    NsysAnalysis(NsysOptions(nsys=True, nsys_bin=str(stand_in.binary)), session).add_to([row(0)])
    [words] = stand_in.calls()
    assert "--trace=cuda,nvtx,cublas,cudnn" in words
    assert "--capture-range-end=repeat" in words


def test_kernels_of_each_part_belong_to_the_cases_of_the_part(
    tiny_trace: Path, tmp_path: Path, windows: list[Path]
) -> None:
    stand_in = NsysStandIn(tmp_path / "bin", windows)
    nsys, notices = Nsys(str(stand_in.binary), tmp_path / "rows.nsys-rep"), list[str]()
    rows = profile_rows(
        request_with(tiny_trace), [row(case) for case in range(WINDOWS)], nsys, 60, notices.append, "cuda:0"
    )
    kernels = [NsysColumns.of(item).nsys_kernels for item in rows]
    assert kernels == [f"kernel{case} x1" for case in range(WINDOWS)]
    assert [NsysColumns.of(item).nsys_runs for item in rows] == [1] * WINDOWS
    # numerical order: the tenth follows the ninth, not the first
    kept = [tmp_path / "rows.nsys-rep", *(tmp_path / f"rows.{number}.nsys-rep" for number in range(2, WINDOWS + 1))]
    assert [span.case for path in kept for span in read_report(path).spans] == list(range(WINDOWS))
    assert notices == [f"open nsys's report in Nsight Systems: {path}" for path in kept]


@pytest.mark.parametrize(("help_text", "has"), [(HELP, True), ("\t--cuda-memory-usage=\n", False)], ids=["new", "old"])
def test_kernels_of_cuda_graphs_are_traced_one_by_one_if_supported(
    tiny_trace: Path, tmp_path: Path, windows: list[Path], help_text: str, has: bool
) -> None:
    stand_in = NsysStandIn(tmp_path / "bin", windows[:1], help_text)
    nsys = Nsys(str(stand_in.binary), tmp_path / "rows.nsys-rep")
    profile_rows(request_with(tiny_trace), [row(0)], nsys, 60, lambda line: None, "cuda:0")
    [words] = stand_in.calls()
    assert ("--cuda-graph-trace=node" in words) is has


def test_kernels_of_a_cuda_graph_belong_to_the_run_that_launched_it(tmp_path: Path) -> None:
    kernels = [
        {"start": start, "end": start + 10, "correlationId": 1, "name": "kernel", "graphNodeId": node}
        for node, start in enumerate((210, 220, 240), 1)
    ]
    path = write_report(tmp_path / "report", [(200, 300, "aten.mm", 7)], [(205, 1)], {"KERNEL": kernels})
    seen = columns_of(path)
    assert (seen.nsys_launches, seen.nsys_gpu_us, seen.nsys_gap_us) == (3.0, 0.03, 0.01)


def test_cuda_graph_traced_as_a_whole_is_one_launch(tmp_path: Path) -> None:
    work = {
        "GRAPH_TRACE": [{"start": 210, "end": 250, "correlationId": 1}, {"start": 320, "end": 330, "correlationId": 2}],
        # a version that traces both reports the time of the second graph twice
        "KERNEL": [{"start": 320, "end": 330, "correlationId": 2, "name": "kernel"}],
    }
    ranges = [(200, 300, "aten.mm", 7), (310, 400, "aten.mm", 7)]
    seen = columns_of(write_report(tmp_path / "report", ranges, [(205, 1), (315, 2)], work))
    assert seen.nsys_kernels == f"{GRAPH_NAME} x0.5; kernel x0.5"
    assert (seen.nsys_launches, seen.nsys_gpu_us) == (1.0, 0.025)


def test_memset_is_neither_a_gap_nor_a_kernel(tmp_path: Path) -> None:
    work = {
        "KERNEL": [
            {"start": 210, "end": 220, "correlationId": 1, "name": "first"},
            {"start": 250, "end": 260, "correlationId": 3, "name": "second"},
        ],
        "MEMSET": [{"start": 220, "end": 245, "correlationId": 2, "bytes": 4096}],
        "MEMCPY": [{"start": 260, "end": 261, "correlationId": 4, "bytes": 0}],
    }
    launches = [(205, 1), (206, 2), (207, 3), (208, 4)]
    seen = columns_of(write_report(tmp_path / "report", [(200, 300, "aten.mm", 7)], launches, work))
    assert (seen.nsys_kernels, seen.nsys_gap_us) == ("first x1; second x1", 0.005)
    assert (seen.nsys_memsets, seen.nsys_copies, seen.nsys_copied_bytes) == (1.0, 1.0, 0)


def test_work_of_preceding_calls_and_flushes_is_not_reported_as_lost(tmp_path: Path) -> None:
    ranges = [(100, 140, BEFORE, 3), (150, 190, READY, 7), (200, 300, "aten.mm", 7)]
    launches = [(90, 1), (110, 2), (160, 3), (205, 4), (350, 5)]
    kernels = [
        {"start": start + 5, "end": start + 9, "correlationId": number, "name": f"kernel{number}"}
        for start, number in launches
    ]
    runs, outside = joined(read_report(write_report(tmp_path / "report", ranges, launches, {"KERNEL": kernels})))
    # the first and the last kernel are outside of our ranges
    assert outside == 2
    assert [work.name for work in runs[7, "eager"][0].work] == ["kernel4"]
    assert set(runs) == {(7, "eager")}


def test_kernel_that_keeps_the_device_busy_is_not_part_of_a_run(tmp_path: Path) -> None:
    kernels = [
        {"start": 205, "end": 230, "correlationId": 1, "name": "spin_kernel"},
        {"start": 240, "end": 250, "correlationId": 2, "name": "gemm"},
    ]
    path = write_report(tmp_path / "report", [(200, 300, "aten.mm", 7)], [(202, 1), (203, 2)], {"KERNEL": kernels})
    seen = columns_of(path)
    assert (seen.nsys_kernels, seen.nsys_gpu_us, seen.nsys_gap_us) == ("gemm x1", 0.01, 0.0)


def test_preceding_calls_run_in_a_separate_range(tiny_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[tuple[str, int]]()

    class Recorded(Range):
        def __init__(self, message: str, category: str, case: int, profiled: str = "") -> None:
            super().__init__(message, category, case, profiled)
            self.name = message, case

        def begin(self) -> None:
            super().begin()
            begun.append(self.name)

    monkeypatch.setattr(subjects, "Range", Recorded)
    before = list[int]()

    def announce(number: int, row: int) -> None:
        if row == NO_ROW:
            before.append(number)

    loaded = load_workload(request_with(tiny_trace, top=3))
    settings = settings_of(iterations=2, warmup=0)
    rows_of(loaded.cases, settings, loaded.surroundings, announce)
    in_ranges = [case for message, case in begun if message == BEFORE]
    assert in_ranges
    # rows that are prepared before others run are announced in the same way
    assert in_ranges == before[-len(in_ranges) :]
