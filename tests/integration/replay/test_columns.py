"""Tests of everything derived from the declarations of options and columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from opgrip.replay import Results
from opgrip.replay.analyses.nsys import NsysColumns
from opgrip.replay.replay_options import request_with
from opgrip.replay.reports.cells import all_columns, read_frame
from opgrip.replay.results.results import Result
from opgrip.replay.run.request import identity
from opgrip.traces import UserError

ROW = Result(3, "aten.mm.default", "float32[2,2]", 2, 1.0, "eager", "cpu", "ok", 1.0, 2.0, median_us=1.5, flops=16)


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_files_and_frames_have_all_columns_in_order_and_round_trip(tmp_path: Path, suffix: str) -> None:
    rows = [ROW.adding(NsysColumns(nsys_us=2.0, nsys_runs=4)), ROW]
    results = Results(rows, {"trace": "t.jsonl"})
    results.save(tmp_path / f"out{suffix}")
    names = [about.name for about in all_columns()]
    assert names[:3] == ["case", "op", "shapes"]
    assert list(read_frame(tmp_path / f"out{suffix}").columns) == list(results.frame.columns) == names
    first, second = Results.load(tmp_path / f"out{suffix}")
    assert (NsysColumns.of(first), NsysColumns.of(second)) == (NsysColumns(nsys_us=2.0, nsys_runs=4), NsysColumns())
    assert type(NsysColumns.of(first).nsys_runs) is int
    assert (first.case, first.flops, second.threads) == (3, 16, None)


def test_roofline_drawing_requires_limits(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="replay with roofline="):
        Results([ROW], {"trace": "t.jsonl"}).save(tmp_path / "out.svg")
    assert not list(tmp_path.iterdir())


def test_explicit_default_options_do_not_change_the_identity(tiny_trace: Path) -> None:
    plain = identity(request_with(tiny_trace))
    assert identity(request_with(tiny_trace, cache="program", mode="eager", timeout=7, memory_limit="8GB")) == plain
    assert (
        identity(request_with(tiny_trace, mode="jit"))
        == identity(request_with(tiny_trace, mode=["eager", "jit"]))
        != plain
    )
    assert identity(request_with(tiny_trace, top=3)) != plain
