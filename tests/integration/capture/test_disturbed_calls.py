"""Calls with page faults, slow memory or other disturbances: they are marked, and their excess time is not used."""

from __future__ import annotations

import time
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_trace import write
from hypothesis import given
from hypothesis import strategies as st
from programs import succeed

from opgrip.capture import Capture, Schedule
from opgrip.capture.command.opcapture import closing_lines
from opgrip.capture.signatures import fitting
from opgrip.capture.timing.page_faults import PERTURBING_NS, CountedCall, OwnWork, SlowMemory
from opgrip.capture.writing import flusher as flushing
from opgrip.platform import contention
from opgrip.platform.contention import TICK_NS, usual_fault_ns
from opgrip.replay.cases.cases import make_cases
from opgrip.traces import Trace, load
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.records import Calls, End, Scope, Signature, Thread

RESULT_PAGES = 4 * (1 << 20) // 4096  # pages of a result of four megabytes


KEPT_AND_GIVEN_BACK = """
import ctypes
import torch

allocator = ctypes.CDLL("libc.so.6")
large = torch.ones(1 << 20)
# M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: glibc keeps what is freed
allocator.mallopt(-3, 32 << 20)
allocator.mallopt(-1, 1 << 30)
torch.ones(1 << 22)
for _ in range(40):
    torch.ops.aten.cos(large)
for _ in range(40):
    allocator.malloc_trim(0)
    torch.ops.aten.sin(large)
"""


def test_page_faults_distinguish_new_from_reused_memory(tmp_path: Path) -> None:
    # a separate program, because results get huge pages in a process in which NumPy has had large arrays
    (tmp_path / "program.py").write_text(KEPT_AND_GIVEN_BACK)
    succeed("opcapture", "-o", "t.jsonl", "--", "program.py", cwd=tmp_path)
    calls = load(tmp_path / "t.jsonl").calls
    faults = {op: calls[calls["op"] == f"aten.{op}.default"]["page_faults"] for op in ("cos", "sin")}
    assert (faults["sin"] > 0.9 * RESULT_PAGES).mean() > 0.9
    # the block moves a little with each call, so a few calls get new pages anyway
    assert (faults["cos"] < 0.1 * RESULT_PAGES).any()


def test_small_calls_and_views_have_no_page_faults(tmp_path: Path) -> None:
    large, small = torch.ones(1 << 20), torch.ones(8)
    with Capture(tmp_path / "t.jsonl") as watched:
        for _ in range(20):
            small.sin()
            large.view(1 << 10, 1 << 10)
    calls = load(tmp_path / "t.jsonl").calls
    assert (watched.calls, watched.dropped) == (40, 0)
    assert (calls["page_faults"] == 0).all()


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


SLOW_S = 0.03


@pytest.fixture
def slow_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = fitting.fit_argument

    def slow(*args: Any) -> Any:
        time.sleep(SLOW_S)
        return fit(*args)

    monkeypatch.setattr(fitting, "fit_argument", slow)


def marks_of(trace: Trace, op: str) -> list[bool]:
    calls = trace.calls[trace.calls["op"] == op]
    return [bool(mark) for mark in calls["perturbed"]]


@pytest.mark.usefixtures("slow_looks")
def test_only_calls_right_after_an_observation_are_perturbed(tmp_path: Path) -> None:
    x = torch.randn(1000)
    with Capture(tmp_path / "t.jsonl"):
        for _ in range(40):
            x.sin()
    marks = marks_of(load(tmp_path / "t.jsonl"), "aten.sin.default")
    assert marks[0]
    assert not any(marks[-10:])


@pytest.mark.usefixtures("slow_looks")
def test_perturbed_times_are_used_if_a_signature_has_no_others(tmp_path: Path) -> None:
    x = torch.randn(1000)
    with Capture(tmp_path / "t.jsonl"):
        x.cos()
        x.sin()
    calls = load(tmp_path / "t.jsonl").calls
    assert len(calls) == 2
    assert calls["perturbed"].all()
    assert (calls["time_ns"] == calls["duration_ns"]).all()


@pytest.mark.usefixtures("slow_looks")
def test_no_call_is_perturbed_after_warmup_steps(tmp_path: Path) -> None:
    x, y = torch.randn(1000), torch.randn(2000)

    def step() -> None:
        for value in (x, y, x):
            value.sin().cos()

    schedule = Schedule(warmup=4, active=3)
    with Capture(tmp_path / "t.jsonl", schedule=schedule) as watched:
        (y + 1).tan()
        for _ in range(7):
            step()
            watched.step()
    trace = load(tmp_path / "t.jsonl", partial=False)
    assert len(trace.own_calls) == 3 * 6
    assert watched.calls == 3 * 6
    assert not trace.calls["perturbed"].any()
    # signatures that only warm-up steps have met are not in the trace
    assert {signature.op for signature in trace.signatures} == {"aten.sin.default", "aten.cos.default"}
    assert watched.signatures == len(trace.signatures) == 4
    assert trace.end is not None
    assert trace.end.signatures == 4


def test_recorded_step_has_values_observed_in_warmup(tmp_path: Path) -> None:
    x = torch.randn(1000) * 7 + 100
    with Capture(tmp_path / "t.jsonl", schedule=Schedule(warmup=1)) as watched:
        for _ in range(2):
            x.sin()
            watched.step()
    trace = load(tmp_path / "t.jsonl", partial=False)
    (signature,) = trace.signatures
    assert 90 < trace.values[signature.args[0].values].mean < 110  # type: ignore[attr-defined, index]


def test_own_work_marks_the_following_and_the_enclosing_call() -> None:
    work = OwnWork()
    work._intervals = [100, 100 + PERTURBING_NS, 200_000, 200_010, 300_000, 300_000 + PERTURBING_NS]
    starts = np.array([0, 100 + PERTURBING_NS, 250_000, 290_000])
    ends = np.array([50, 150_000, 260_000, 400_000])
    assert work.take(starts, ends) == [(1, 1), (3, 1)]
