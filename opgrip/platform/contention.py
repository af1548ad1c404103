"""Detection of disturbed measurements: other programs used the processors, or page faults were slow."""

from __future__ import annotations

import functools
import mmap
import resource
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import O_RDONLY, close, listdir, pread, sched_getaffinity, sysconf
from os import open as open_file
from pathlib import Path

import numpy as np
import torch

from opgrip.cli.output_files import identity_of
from opgrip.platform import perf_counter_ns, process_time_ns, sleep, thread_time_ns

PROC = Path("/proc")
# maximum share of a run that its threads may wait for processors in total, or that a hypervisor may take of all
# processors
SHARE = 0.05
# time in ns that a thread may wait for a processor when it wakes up; ten microseconds are normal on a quiet machine
WAKING_NS = 100_000
MOST_BY_OTHERS = 0.1  # share of this process's processors that other programs may use
# unit of /proc/stat in ns, and error, in such units, of the time that other programs used processors
STAT_NS, STAT_ERROR = 1_000_000_000 // sysconf("SC_CLK_TCK"), 2
# longest time in ns to wait for other threads, interval in ns of looking, and share of a processor they may use then
SPIN_NS, LOOK_NS, MOST_SPINNING = 20_000_000, 50_000, 0.1
# intervals in ns of listing threads, and of reading /proc/stat, which counts in steps of 10 ms
THREADS_NS, OTHERS_NS = 50_000_000, 200_000_000
# WARM_NS: time in ns after a switch to another process from which on a run is no longer slower because of the switch
# (measured: a call of 3 us took 30 us right after a switch, the next one 5 us). RARE: if switches are further apart
# than this multiple of it, or a run is longer, the effect is negligible.
WARM_NS, RARE = 200_000, 10


@dataclass(frozen=True, slots=True)
class Waits:
    at_ns: int
    time_ns: int
    count: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time used until `at_ns`, in ns, on all processors that this process may run on.

    busy_ns : time used by all programs, or taken by a hypervisor, since the machine was booted
    own_ns : time used by this process and processes that work for it
    """

    at_ns: int
    busy_ns: float
    stolen_ns: float
    own_ns: int


class Contention:
    """Detects when other programs slow this process, or processes that work for it.

    threads : number of threads that run at the same time; None for the number that torch uses for one operator
    workers : returns the ids of the processes that do the measured work; None if this process does it
    """

    def __init__(
        self,
        proc: Path = PROC,
        threads: int | None = None,
        ignored: int | None = None,
        workers: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        self._proc, self._workers = proc, workers
        self._threads, self._ignored = threads, str(ignored)
        # descriptors with the identities of their files: the program may close them and use the numbers again
        self._files: dict[str, tuple[int, tuple[int, int] | None]] = {}
        self._last: dict[str, tuple[int, int, int]] = {}
        self._work_ns = self._time_ns = self._count = 0
        self._listed_ns = perf_counter_ns()
        self._usage = self._read_usage()
        self._others = self._stolen = 0.0
        # until the time of others is known, they are blamed for each wait
        self._are_others_busy = True
        self._list_threads()
        self._asked = self.read()

    def read(self) -> Waits:
        now = perf_counter_ns()
        if now - self._listed_ns > THREADS_NS:
            self._listed_ns = now
            self._list_threads()
        for thread, file in list(self._files.items()):
            try:
                work_ns, time_ns, count = _waits_in(file[0])
            except (OSError, ValueError):
                _close(*self._files.pop(thread))
                continue
            last_work_ns, last_ns, last_count = self._last[thread]
            self._work_ns += work_ns - last_work_ns
            self._time_ns += time_ns - last_ns
            self._count += count - last_count
            self._last[thread] = work_ns, time_ns, count
        return Waits(
            now, self._time_ns, self._count if self._files else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        )

    def is_contended(self, since: Waits | None = None, run_ns: float | None = None) -> bool:
        """Return True if other programs probably slowed the measured threads in a period that ends now.

        since : waits read at the start of the period; None if the period began with the previous call of this method
        run_ns : duration of the measured run within the period; None for the whole period
        """
        waits = self.read()
        since, self._asked = since or self._asked, waits
        run_ns = waits.at_ns - since.at_ns if run_ns is None else run_ns
        self._look_at_others()
        if self._stolen > SHARE:
            return True
        if (self._threads or torch.get_num_threads()) > len(sched_getaffinity(0)):
            # the threads also wait for each other
            return self._others > MOST_BY_OTHERS
        if not self._are_others_busy:
            # the threads waited for each other
            return False
        time_ns, count = waits.time_ns - since.time_ns, waits.count - since.count
        return time_ns - WAKING_NS * count > SHARE * run_ns if self._files else count > 0

    def is_run_contended(self, marks: Sequence[Waits], run_ns: float) -> bool:
        start = marks[-1]
        if self.is_contended(start, run_ns):
            return True
        if run_ns >= RARE * WARM_NS or not self._are_others_busy:
            return False
        since = next((mark for mark in reversed(marks) if mark.at_ns <= start.at_ns - WARM_NS), marks[0])
        waited_ns, waits = start.time_ns - since.time_ns, start.count - since.count
        worked_ns = start.at_ns - since.at_ns - waited_ns
        return waited_ns > WAKING_NS * waits and worked_ns < RARE * WARM_NS * waits

    @property
    def is_shared(self) -> bool:
        """Return True if other programs recently used more than a tenth of this process's processors."""
        self._look_at_others()
        return self._others > MOST_BY_OTHERS

    @property
    def has_room(self) -> bool:
        """Return True if other programs recently left enough processors free for the measured threads."""
        self._look_at_others()
        processors = len(sched_getaffinity(0))
        threads = min(self._threads or torch.get_num_threads(), processors)
        return self._others * processors <= processors - threads + MOST_BY_OTHERS * threads

    def close(self) -> None:
        for file in self._files.values():
            _close(*file)
        self._files.clear()

    def _list_threads(self) -> None:
        self._files = {thread: file for thread, file in self._files.items() if identity_of(file[0]) == file[1]}
        for process in ["self"] if self._workers is None else self._workers():
            folder = f"{self._proc}/{process}/task"
            with suppress(OSError):
                for thread in listdir(folder):
                    if thread not in self._files and thread != self._ignored:
                        with suppress(OSError, ValueError):
                            number = open_file(f"{folder}/{thread}/schedstat", O_RDONLY)
                            self._files[thread] = number, identity_of(number)
                            self._last[thread] = _waits_in(number)

    def _look_at_others(self) -> None:
        before = self._usage
        if before is None or perf_counter_ns() - before.at_ns < OTHERS_NS:
            return
        if self._workers is not None:
            self.read()
        usage = self._read_usage()
        if usage is not None:
            span_ns = (usage.at_ns - before.at_ns) * len(sched_getaffinity(0))
            others_ns = usage.busy_ns - before.busy_ns - (usage.own_ns - before.own_ns)
            self._others, self._stolen = others_ns / span_ns, (usage.stolen_ns - before.stolen_ns) / span_ns
            busy_ns = MOST_BY_OTHERS * (usage.at_ns - before.at_ns) + STAT_ERROR * STAT_NS
            self._usage, self._are_others_busy = usage, others_ns > busy_ns

    def _read_usage(self) -> Usage | None:
        names = {f"cpu{number}" for number in sched_getaffinity(0)}
        busy = stolen = 0
        try:
            for line in (self._proc / "stat").read_text(encoding="ascii").splitlines():
                name, *words = line.split()
                if name in names:
                    user, nice, system, _, _, *interrupts, steal = map(int, words[:8])
                    busy += user + nice + system + sum(interrupts) + steal
                    stolen += steal
        except (OSError, ValueError):
            return None
        own_ns = process_time_ns() + (0 if self._workers is None else self._work_ns)
        return Usage(perf_counter_ns(), busy * STAT_NS, stolen * STAT_NS, own_ns)


def let_threads_sleep() -> None:
    """Wait a short time for the other threads of this process to leave their processors."""
    began = perf_counter_ns()
    others_ns, until_ns = process_time_ns() - thread_time_ns(), began + SPIN_NS
    while began < until_ns:
        sleep(LOOK_NS / 1e9)
        now, before_ns, others_ns = perf_counter_ns(), others_ns, process_time_ns() - thread_time_ns()
        if others_ns - before_ns <= MOST_SPINNING * (now - began):
            return
        began = now


def _waits_in(number: int) -> tuple[int, int, int]:
    # returns ns on a processor, ns waiting for one, and number of waits
    work_ns, time_ns, count = pread(number, 64, 0).split()
    return int(work_ns), int(time_ns), int(count)


def _close(number: int, identity: tuple[int, int] | None) -> None:
    if identity_of(number) == identity:
        with suppress(OSError):
            close(number)


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROBED_BYTES, PROBES = 2 << 20, 3
TICK_NS = 4_000_000  # time in ns of one tick, the unit in which most kernels count the system time of a process


def is_slow(faults: float, system_ns: float, usual_ns: float) -> bool:
    """Return True if the time that the kernel spent on page faults exceeds the usual time by more than chance."""
    usual = faults * usual_ns / TICK_NS
    chance: float = 3 * usual**0.5 + 3
    return system_ns / TICK_NS >= usual + chance


@functools.cache
def usual_fault_ns() -> float | None:
    if not hasattr(mmap, "MADV_DONTNEED") or _has_huge_pages():
        return None
    with mmap.mmap(-1, PROBED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        costs = [_touch(memory) for _ in range(PROBES)]
    costs_ns = [cost for cost in costs[1:] if cost is not None]
    return min(costs_ns) if costs_ns else None


def _touch(memory: mmap.mmap) -> float | None:
    # returns ns per page fault
    pages = np.frombuffer(memory, dtype=np.uint8)[:: resource.getpagesize()]
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, perf_counter_ns()
    pages[:] = 1
    duration = perf_counter_ns() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    del pages
    memory.madvise(mmap.MADV_DONTNEED)
    return duration / faults if faults else None


def _has_huge_pages() -> bool:
    try:
        return "[always]" in HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return False
