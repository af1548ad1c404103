"""Detection of other programs that used the processors while runs were timed."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from others import busy_processors

from opgrip.platform import contention
from opgrip.platform.contention import Contention, let_threads_sleep

MS = 1_000_000


class Machine:
    """Fake of the kernel's accounting of a process with two threads, with a clock that the test advances."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self._folder = folder
        self._waits = {"7": [0, 0], "8": [0, 0]}
        self._busy_ticks = self._stolen_ticks = 0
        monkeypatch.setattr(contention, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(contention, "process_time_ns", lambda: 0)
        self.passes(0)

    def passes(
        self, span_ns: int, waited_ns: int = 0, waits: int = 0, stolen_ticks: int = 0, busy_ticks: int = 0
    ) -> None:
        """Let time pass, during part of which a thread waits for a processor."""
        self.now += span_ns
        self._waits["8"][0] += waited_ns
        self._waits["8"][1] += waits
        self._stolen_ticks += stolen_ticks
        self._busy_ticks += busy_ticks
        for thread, (time, times) in self._waits.items():
            task = self._folder / "self" / "task" / thread
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"123 {time} {times}\n")
        counts = f"{self._busy_ticks} 2 3 4 5 6 7 {self._stolen_ticks} 0 0"
        lines = [f"cpu{number} {counts}" for number in sorted(os.sched_getaffinity(0))]
        (self._folder / "stat").write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 0 0", *lines]) + "\n")


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


def test_contention_is_judged_for_any_span_and_part(machine: Machine, tmp_path: Path) -> None:
    with closing(Contention(tmp_path)) as watch:
        start = watch.read()
        machine.passes(100 * MS, waited_ns=4 * MS, waits=1)
        assert not watch.is_contended(start)
        assert watch.is_contended(start, run_ns=MS)
        assert not watch.is_contended(run_ns=MS)


def test_own_threads_beyond_the_processors_are_not_contention(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + len(os.sched_getaffinity(0)))
    with closing(Contention(tmp_path)) as watch:
        machine.passes(300 * MS, waited_ns=4 * MS, waits=1)
        assert not watch.is_contended()
        # then only the time used by other programs shows contention
        machine.passes(300 * MS, busy_ticks=10)
        assert watch.is_contended()


def test_room_for_own_threads_depends_on_other_programs(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processors = len(os.sched_getaffinity(0))
    for threads, has_room in ((processors, False), (max(processors // 2, 1), processors > 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with closing(Contention(tmp_path)) as watch:
            machine.passes(300 * MS)
            assert (watch.has_room, watch.is_shared) == (True, False)
            machine.passes(300 * MS, busy_ticks=14)
            assert (watch.has_room, watch.is_shared) == (has_room, True)


def test_stolen_time_of_a_hypervisor_is_contention(machine: Machine, tmp_path: Path) -> None:
    with closing(Contention(tmp_path)) as watch:
        machine.passes(300 * MS, stolen_ticks=15)
        assert watch.is_contended()
        machine.passes(300 * MS)
        assert not watch.is_contended()


def test_workers_are_watched_instead_and_are_not_other_programs(machine: Machine, tmp_path: Path) -> None:
    counts = tmp_path / "41" / "task" / "41" / "schedstat"
    counts.parent.mkdir(parents=True)
    counts.write_text("0 0 0\n")
    with closing(Contention(tmp_path, workers=lambda: [41])) as watch:
        machine.passes(300 * MS, waited_ns=100 * MS, waits=1)
        assert not watch.is_contended()
        counts.write_text(f"{300 * MS * len(os.sched_getaffinity(0))} 0 0\n")
        machine.passes(300 * MS, busy_ticks=30)
        assert (watch.is_shared, watch.has_room) == (False, True)
        counts.write_text(f"0 {100 * MS} 1\n")
        machine.passes(300 * MS, busy_ticks=30)
        assert watch.is_contended()


def test_own_threads_that_wait_for_each_other_are_not_contention(machine: Machine, tmp_path: Path) -> None:
    with closing(Contention(tmp_path)) as watch:
        machine.passes(300 * MS, waited_ns=100 * MS, waits=1, busy_ticks=2 // len(os.sched_getaffinity(0)))
        assert not watch.is_contended()
        assert not watch.is_run_contended([watch.read()], MS)
        machine.passes(300 * MS, waited_ns=100 * MS, waits=1, busy_ticks=15)
        assert watch.is_contended()


@pytest.mark.alone
def test_threads_of_a_pool_sleep_before_those_of_another_run() -> None:
    ended: list[bytes] = []
    for count in range(1, 21):
        # releases the lock, and uses a processor for some milliseconds as a waiting thread of a pool does
        threading.Thread(target=lambda: ended.append(sha256(bytes(4 << 20)).digest())).start()
        let_threads_sleep()
        if len(ended) == count:
            return
    pytest.fail("a thread still ran")


def test_other_programs_on_the_real_machine_are_detected() -> None:
    numbers = torch.randn(1 << 18)
    with closing(Contention()) as watch, busy_processors():
        assert any(_sees(watch, numbers) for _ in range(50))


def _sees(watch: Contention, numbers: torch.Tensor) -> bool:
    for _ in range(20):
        numbers.exp().sum()
    return watch.is_contended()
