"""Whether others had the processors while runs were timed."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
from others import busy_processors

from opgrip.traces import contention
from opgrip.traces.contention import Contention

MS = 1_000_000


class Machine:
    """What a kernel tells of a process with two threads; time passes when it is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self._folder = folder
        self._waits = {"7": [0, 0], "8": [0, 0]}
        self._steal = 0
        monkeypatch.setattr(contention, "perf_counter_ns", lambda: self.now)
        self.passes(0)

    def passes(self, span_ns: int, waited_ns: int = 0, waits: int = 0, steal_ticks: int = 0) -> None:
        """Let time pass, of which a thread has waited for a processor."""
        self.now += span_ns
        self._waits["8"][0] += waited_ns
        self._waits["8"][1] += waits
        self._steal += steal_ticks
        for thread, (time, times) in self._waits.items():
            task = self._folder / "self" / "task" / thread
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"123 {time} {times}\n")
        (self._folder / "stat").write_text(f"cpu  1 2 3 4 5 6 7 {self._steal} 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return Machine(tmp_path, monkeypatch)


def test_waiting_for_a_processor_is_contention_and_waking_up_is_not(machine: Machine, tmp_path: Path) -> None:
    with closing(Contention(tmp_path)) as watch:
        machine.passes(2 * MS)
        assert not watch.is_contended()
        machine.passes(2 * MS, waited_ns=4 * MS, waits=1)
        assert watch.is_contended()
        machine.passes(2 * MS)
        assert not watch.is_contended()
        machine.passes(2 * MS, waited_ns=2 * MS, waits=40)
        assert not watch.is_contended()


def test_more_threads_than_processors_wait_for_each_other(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + len(os.sched_getaffinity(0)))
    with closing(Contention(tmp_path)) as watch:
        machine.passes(2 * MS, waited_ns=4 * MS, waits=1)
        assert not watch.is_contended()


def test_what_a_hypervisor_takes_is_contention(machine: Machine, tmp_path: Path) -> None:
    with closing(Contention(tmp_path)) as watch:
        machine.passes(300 * MS, steal_ticks=15 * (os.cpu_count() or 1))
        assert watch.is_contended()
        machine.passes(300 * MS)
        assert not watch.is_contended()


def test_a_thread_that_has_ended_is_forgotten_and_a_new_one_is_seen(machine: Machine, tmp_path: Path) -> None:
    with closing(Contention(tmp_path)) as watch:
        task = tmp_path / "self" / "task"
        (task / "9").mkdir()
        (task / "9" / "schedstat").write_text("1 0 0\n")
        (task / "7" / "schedstat").write_text("")
        machine.passes(100 * MS)
        (task / "7" / "schedstat").write_text("")
        assert not watch.is_contended()
        (task / "9" / "schedstat").write_text(f"1 {50 * MS} 1\n")
        machine.passes(100 * MS)
        assert watch.is_contended()


def test_without_counts_of_the_kernel_switches_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switches = iter([5, 5, 6, 6])
    monkeypatch.setattr(contention, "_switches", lambda: next(switches))
    with closing(Contention(tmp_path)) as watch:
        assert [watch.is_contended() for _ in range(3)] == [False, True, False]


def test_other_programs_on_the_real_machine_are_seen() -> None:
    numbers = torch.randn(1 << 18)
    with closing(Contention()) as watch, busy_processors():
        assert any(_sees(watch, numbers) for _ in range(50))


def _sees(watch: Contention, numbers: torch.Tensor) -> bool:
    for _ in range(20):
        numbers.exp().sum()
    return watch.is_contended()
