"""Tests of calls with slow page faults: they are marked, and the excess time is not counted."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from example_trace import write
from hypothesis import given
from hypothesis import strategies as st

from opgrip.capture import Capture
from opgrip.capture.command.opcapture import closing_lines
from opgrip.capture.timing.page_faults import CountedCall, SlowMemory
from opgrip.capture.writing import flusher as flushing
from opgrip.platform import contention
from opgrip.platform.contention import TICK_NS, usual_fault_ns
from opgrip.replay.cases.cases import make_cases
from opgrip.traces import load
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Calls, End, Scope, Signature, Thread

USUAL_NS, SLOW_NS = 2_000, 12_000
PAGES, WORK_NS = 3_000, 4_000_000  # page faults of a call that creates 12 MB, and its remaining time


def counted(cost_ns: float, calls: int, work_ns: int = WORK_NS, pages: int = PAGES) -> dict[int, CountedCall]:
    """Return calls whose page faults have the given cost, as counted by a kernel that samples every 4 ms."""
    wanted = [place * pages * cost_ns for place in range(calls + 1)]
    ticks = [int(time // TICK_NS) for time in wanted]
    durations = [int(pages * cost_ns + work_ns)] * calls
    starts = [0, *accumulate(durations)]
    return {
        place: CountedCall(pages, starts[place], durations[place], (after - before) * TICK_NS, durations[place])
        for place, (before, after) in enumerate(pairwise(ticks))
    }


@given(calls=st.integers(2, 40), cost_ns=st.floats(2.5 * USUAL_NS, 100 * USUAL_NS), threads=st.integers(1, 64))
def test_excess_time_of_slow_page_faults_is_estimated(calls: int, cost_ns: float, threads: int) -> None:
    found = SlowMemory(USUAL_NS).slow_calls(counted(cost_ns, calls), [0] * calls)
    expected = PAGES * (cost_ns - USUAL_NS)
    if expected * calls < 15 * TICK_NS:
        # the number of ticks is too small for an estimate
        return
    assert [place for place, _ in found] == [*range(calls)]
    assert sum(excess for _, excess in found) == pytest.approx(expected * calls, rel=0.15)


@given(
    calls=st.integers(1, 1000),
    pages=st.integers(1, 5000),
    work_ns=st.integers(0, 10**9),
    cost_ns=st.floats(0, 1.5 * USUAL_NS),
)
def test_calls_with_fast_page_faults_are_not_marked(calls: int, pages: int, work_ns: int, cost_ns: float) -> None:
    memory = SlowMemory(USUAL_NS)
    assert memory.slow_calls(counted(cost_ns, calls, work_ns, pages), [0] * calls) == []
    assert memory.excess_ns == 0
    assert SlowMemory(None).slow_calls(counted(50 * SLOW_NS, calls), [0] * calls) == []


def trace_with(path: Path, slow: list[int], calls: int = 4) -> Path:
    spec = TensorSpec((8, 8), (8, 1), torch.float32, "cpu")
    excess = 9_000_000
    durations = [1_000_000 + excess * (place in slow) for place in range(calls)]
    block = Calls(
        *(0, [0] * calls, [0] * calls, [place * 20_000_000 for place in range(calls)], durations),
        *([2] * calls, [*range(2 * calls)], -1),
        page_faults=[(place, 3000) for place in range(calls)],
        perturbed=[(place, 1) for place in slow],
        slow_memory=[(place, excess) for place in slow],
    )
    signature = Signature(0, "operator", "aten.sin.default", (spec,), {}, spec)
    return write(path, [signature, Scope(0, "", "", "forward"), Thread(0, "MainThread"), block, End(calls, 1, 10**9)])


@pytest.mark.parametrize(("slow", "is_marked"), [([], False), ([0, 2], False), ([0, 1, 2, 3], True)])
def test_medians_and_shares_exclude_slow_memory(slow: list[int], is_marked: bool, tmp_path: Path) -> None:
    trace = load(trace_with(tmp_path / "t.jsonl", slow))
    assert trace.calls["time_ns"].tolist() == trace.distinct_calls["time_ns"].tolist() == [1_000_000] * 4
    assert trace.summary()["time_us"].tolist() == [4_000]
    (case,) = make_cases(trace)
    assert case.captured_us == 1_000
    assert (case.perturbed >= case.count) == is_marked


@pytest.fixture
def slow_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine that is slow to provide memory: set the usual cost of a fault below any real one."""
    monkeypatch.setattr("opgrip.capture.recording.recorder.usual_fault_ns", lambda: 20.0)


@pytest.mark.usefixtures("slow_faults")
def test_capture_on_slow_memory_reports_it(tmp_path: Path) -> None:
    with Capture(tmp_path / "t.jsonl") as capture:
        for _ in range(20):
            # larger than blocks that the C library keeps
            torch.zeros(12 << 20)
    assert any(line.startswith("the machine was slow to provide memory") for line in closing_lines(capture))
    calls = load(tmp_path / "t.jsonl").calls
    slow = calls["slow_memory_ns"] > 0
    assert slow.any()
    assert calls["perturbed"][slow].all()


class Busy:
    """Permanent contention."""

    def __init__(self, ignored: int) -> None:
        assert ignored

    def is_contended(self) -> bool:
        return True

    def close(self) -> None:
        pass


def test_capture_on_a_busy_machine_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flushing, "Contention", Busy)
    monkeypatch.setattr("opgrip.capture.writing.blocks.INTERRUPTED_NS", 1)
    with Capture(tmp_path / "t.jsonl") as capture:
        torch.ones(4) + 1
    assert any(line.startswith("the machine was busy in 100% of the") for line in closing_lines(capture))
    trace = load(tmp_path / "t.jsonl")
    assert trace.end is not None
    assert trace.end.contended == 1
    assert trace.calls["perturbed"].all()


def test_usual_page_fault_cost_is_plausible() -> None:
    if contention._has_huge_pages():
        pytest.skip("this system provides huge pages unasked")
    usual = usual_fault_ns()
    assert usual is not None
    assert 10 < usual < 1_000_000
