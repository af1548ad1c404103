"""Whether others had the processors while this process would have run: other programs, or another virtual machine.

A probe of the main thread's pace does not see it: a parallel operator waits at each of its barriers for the one of its
threads that has no processor, and takes a hundred times as long, while the main thread spins.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from time import perf_counter_ns

import torch

PROC = Path("/proc")
SHARE = 0.05
"""Of a span's time, what its threads wait in all for a processor, or what a hypervisor takes of all processors."""
LONG_WAIT_NS = 200_000
"""Mean wait for a processor that is no mere waking up, which takes some ten microseconds."""
THREADS_NS, STEAL_NS = 50_000_000, 200_000_000
"""After which threads are listed again, and the hypervisor's share is read, which is counted in 10 ms."""


class Contention:
    """Tells of spans of time whether this process waited for processors in them.

    Where the kernel counts no waits, a switch to another thread that this one did not ask for counts as one.

    Parameters
    ----------
    proc : where the kernel tells of processes
    ignored : native number of a thread whose waits do not count
    """

    def __init__(self, proc: Path = PROC, ignored: int | None = None) -> None:
        self._proc = proc
        self._ignored = str(ignored)
        self._files: dict[str, int] = {}
        self._waited: dict[str, tuple[int, int]] = {}
        self._listed_ns = self._began_ns = self._steal_ns = perf_counter_ns()
        self._steal = self._read_steal()
        self._is_stolen = False
        self._switches = _switches()
        self._list_threads()

    def is_contended(self) -> bool:
        """Whether it waited in the span since it was asked last."""
        now = perf_counter_ns()
        waited, waits = self._read_waits()
        span = now - self._began_ns
        self._began_ns = now
        if now - self._listed_ns > THREADS_NS:
            self._listed_ns = now
            self._list_threads()
        if now - self._steal_ns > STEAL_NS:
            before, self._steal = self._steal, self._read_steal()
            self._is_stolen = self._steal - before > SHARE * (now - self._steal_ns)
            self._steal_ns = now
        if not self._files:
            before, self._switches = self._switches, _switches()
            return self._is_stolen or self._switches > before
        # with more threads than processors it waits for itself
        if torch.get_num_threads() > len(os.sched_getaffinity(0)):
            return self._is_stolen
        return self._is_stolen or (waited > SHARE * span and waited > LONG_WAIT_NS * waits)

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _list_threads(self) -> None:
        """Find the threads of this process that are new."""
        folder = self._proc / "self" / "task"
        with suppress(OSError):
            for thread in os.listdir(folder):
                if thread not in self._files and thread != self._ignored:
                    with suppress(OSError, ValueError):
                        file = os.open(folder / thread / "schedstat", os.O_RDONLY)
                        self._files[thread] = file
                        self._waited[thread] = _wait_of(file)

    def _read_waits(self) -> tuple[int, int]:
        """Time in ns that threads have waited since this was read last, and how often."""
        time = times = 0
        for thread, file in list(self._files.items()):
            try:
                waited = _wait_of(file)
            except (OSError, ValueError):
                os.close(self._files.pop(thread))
                continue
            before = self._waited[thread]
            time, times = time + waited[0] - before[0], times + waited[1] - before[1]
            self._waited[thread] = waited
        return time, times

    def _read_steal(self) -> float:
        """What a hypervisor has taken of a processor, in ns, the mean over all."""
        try:
            words = (self._proc / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()
            return int(words[8]) / os.sysconf("SC_CLK_TCK") * 1e9 / (os.cpu_count() or 1)
        except (OSError, ValueError, IndexError):
            return 0.0


def _wait_of(file: int) -> tuple[int, int]:
    _, time, times = os.pread(file, 64, 0).split()
    return int(time), int(times)


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
