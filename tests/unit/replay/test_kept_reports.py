"""Output of `benchmarks/gpu_check.py` on a real GPU: reports of profilers, with the rows that they belong to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import ROOT

from opgrip.replay.analyses.ncu.ncu import BASIC, DURATION, kernels_of_csv
from opgrip.replay.analyses.ncu.ncu import joined as joined_ncu
from opgrip.replay.analyses.nsys import joined as joined_nsys
from opgrip.replay.analyses.nsys import read_report
from opgrip.replay.reports.cells import read_results

KEPT = ROOT / "tests/data/gpu"


def kept(name: str) -> Path:
    path = KEPT / name
    if not path.exists():
        pytest.skip(f"there is no {path}: unzip what `make gpu-check` leaves on a machine with a GPU there")
    return path


def test_kernels_of_a_kept_ncu_report_belong_to_rows() -> None:
    text = kept("ncu.csv").read_text(encoding="utf-8")
    kernels = list(kernels_of_csv(text, BASIC))
    found, outside = joined_ncu(read_results(kept("ncu.json")), kernels)
    assert kernels
    assert outside == 0
    assert all(kernel.metrics[DURATION] > 0 and kernel.name for kernel in kernels)
    assert all(set(kernel.metrics) == set(BASIC) for kernel in kernels)
    assert found


def test_kernels_of_a_kept_nsys_report_belong_to_rows() -> None:
    report = read_report(kept("nsys.sqlite"))
    seen, outside = joined_nsys(report)
    assert report.work
    assert outside < len(report.work) / 100
    assert {case for case, _ in seen} <= {row.case for row in read_results(kept("nsys.json"))}


def test_kept_gpu_check_has_no_wrong_step() -> None:
    steps = json.loads(kept("check.json").read_text(encoding="utf-8"))["steps"]
    assert {step["name"]: step["reason"] for step in steps if step["verdict"] == "wrong"} == {}
    assert any(step["verdict"] == "ok" for step in steps)
