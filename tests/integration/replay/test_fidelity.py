"""Tests of the comparison of replayed with captured times, on the machine where a trace was captured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from made_runs import make_row
from programs import succeed

from opgrip.capture import Capture
from opgrip.replay import replay
from opgrip.replay.cases.cases import Case, make_cases
from opgrip.replay.reports.fidelity import with_doubts
from opgrip.replay.reports.outcome import Results
from opgrip.replay.reports.results_table import MEANINGS
from opgrip.traces import Trace, load


def test_replay_ends_with_its_error_if_the_trace_is_of_this_machine(tiny_trace: Path, tmp_path: Path) -> None:
    done = succeed("opreplay", tiny_trace, "--top", 3, "--mode", "eager,jit", "-o", tmp_path / "r.json")
    run = Results.load(tmp_path / "r.json")
    rows = [row for row in run if row.mode == "eager" and row.status == "ok"]
    if not rows:
        pytest.skip("other processes used the cores")
    captured, replayed = ([row.count * getattr(row, name) for row in rows] for name in ("captured_us", "median_us"))
    off = sum(abs(one - other) for one, other in zip(captured, replayed, strict=True))
    assert run.fidelity is not None
    assert run.fidelity.ratio == pytest.approx(sum(replayed) / sum(captured))
    assert run.fidelity.error == pytest.approx(off / sum(captured))
    assert run.fidelity.share < 1
    assert run.fidelity.share == pytest.approx(sum(row.share for row in rows))
    assert run.fidelity.doubtful_rows == sum("differs" in row.doubts for row in rows)
    assert done.stderr.splitlines()[-1] == f"opreplay: {run.fidelity.line}"
    assert json.loads((tmp_path / "r.json").read_bytes())["fidelity"]["error"] == run.fidelity.error


def test_times_of_other_machines_and_other_ways_to_run_are_not_compared(tiny_trace: Path, tmp_path: Path) -> None:
    header, *records = tiny_trace.read_text(encoding="utf-8").splitlines()
    facts = json.loads(header)
    facts["devices"]["cpu"] += " of another machine"
    (tmp_path / "other.jsonl").write_text("\n".join([json.dumps(facts), *records]), encoding="utf-8")
    assert replay(tmp_path / "other.jsonl", top=1, iterations=1).fidelity is None
    assert replay(tiny_trace, top=1, iterations=1, values="zeros").fidelity is None
    assert replay(tiny_trace, unit="module", iterations=1).fidelity is None


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, dict[str, Case]]:
    path, is_over, has_begun = tmp_path_factory.mktemp("traces") / "t.jsonl", Event(), Event()

    def run_beside() -> None:
        while not is_over.is_set():
            torch.rand(1 << 20).sort()
            has_begun.set()

    with Capture(path):
        torch.rand(8, 8).mm(torch.rand(8, 8))
        torch.nn.functional.embedding(torch.randint(0, 50, (400,)), torch.rand(50, 4))
        thread = Thread(target=run_beside)
        thread.start()
        assert has_begun.wait(60)
        torch.rand(1 << 24).cos()
        is_over.set()
        thread.join()
    trace = load(path)
    return trace, {case.op.split(".")[1]: case for case in make_cases(trace)}


@pytest.mark.parametrize(
    ("op", "cells", "doubts"),
    [
        ("mm", {}, "differs (unknown)"),
        ("mm", {"captured_us": 250.0}, "differs (unknown)"),
        ("mm", {"captured_us": 140.0}, ""),
        ("mm", {"share": 0.01}, ""),
        ("mm", {"dtype": "float64"}, ""),
        ("mm", {"noisy": True}, "noisy, differs"),
        ("mm", {"captured_spread": None}, "differs (captured time)"),
        ("mm", {"captured_us": 3.0}, "differs (short)"),
        ("mm", {"dropped": 9}, "differs (repeated runs)"),
        ("mm", {"bytes_out": 1 << 20}, "differs (new memory)"),
        ("embedding", {}, "differs (values)"),
        ("cos", {}, "differs (other threads)"),
    ],
)
def test_rows_far_from_their_captured_times_say_why(
    op: str, cells: dict[str, object], doubts: str, traced: tuple[Trace, dict[str, Case]]
) -> None:
    trace, case = traced[0], replace(traced[1][op], fresh=None)
    assert trace.end is not None
    calm = replace(trace, end=replace(trace.end, contended=0.0))
    about: dict[str, Any] = {"captured_us": 50.0, "captured_spread": 0.1, "share": 0.5, "method": "discrete"} | cells
    (row,) = with_doubts([replace(make_row(case.number, [100.0] * 3), **about)], [case], calm)
    assert row.doubts == doubts
    assert replace(row, detail="").doubts == doubts
    assert doubts.rpartition(", ")[2] in (*MEANINGS, "differs", "")
