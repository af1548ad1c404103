"""Energy that a GPU uses while a call runs, and the GPU's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import ceil
from statistics import fmean
from threading import Event, Thread
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

from opgrip.cli.options import OUTPUT, option, titled
from opgrip.platform.machine import Gpu, open_gpu
from opgrip.platform.sandbox import IDLE
from opgrip.replay.results.columns import Columns, column

if TYPE_CHECKING:
    from opgrip.replay.timing.rounds import Announce

# seconds of runs that are measured; the counter changes every few hundredths of a second, so the error is some percent
SECONDS = 1.0
BLOCK_S = 0.1  # seconds of runs between synchronizations; with shorter blocks the GPU would be idle most of the time
IDLE_S = 0.3  # seconds for which the idle GPU is measured
EVERY_S = 0.05  # minimum seconds between two readings of clock and power, each of which takes up to some milliseconds
MOST_GROWTH = 10.0


@titled("roofline and energy")
@dataclass(frozen=True, slots=True)
class EnergyOptions:
    energy: bool = option(
        False,
        "run each case for one more second on a GPU, and report energy, clock and throttling",
        only=("single cases",),
        role=OUTPUT,
    )

    def check(self, device: str) -> None:
        if self.energy:
            open_gpu(device).close()


@dataclass(frozen=True, slots=True)
class EnergyColumns(Columns):
    energy_mj: float | None = column("energy of the GPU for one run, including its idle power", "mJ")
    energy_above_idle_mj: float | None = column(
        "energy of the GPU for one run, minus that of an idle GPU in the same time", "mJ"
    )
    idle_w: float | None = column("power of the idle GPU just before the runs", "W")


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy and clock of a GPU while a call runs repeatedly; None for values that the GPU does not report.

    millijoules : energy of one run, including idle power, in mJ
    above_idle_mj : energy of one run minus that of an idle GPU in the same time, in mJ
    clock_mhz : mean clock of the multiprocessors during the runs
    """

    millijoules: float | None
    above_idle_mj: float | None
    idle_w: float | None
    clock_mhz: float | None
    throttled: tuple[str, ...]

    @property
    def columns(self) -> EnergyColumns:
        return EnergyColumns(self.millijoules, self.above_idle_mj, self.idle_w)


class Meter:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._idle_w: float | None = None

    def measure(
        self, run: Callable[[], object], wait: Callable[[], None], seconds: float = SECONDS, idle_s: float = IDLE_S
    ) -> Energy:
        wait()
        if self._idle_w is None:
            self._idle_w = self._idle_watts(idle_s)
        count = _block_size(run, wait)
        runs = 0
        with _Watch(self._gpu) as watch:
            before, began = self._gpu.energy_mj(), perf_counter()
            while not runs or perf_counter() - began < seconds:
                for _ in range(count):
                    run()
                wait()
                runs += count
            elapsed_s, after = perf_counter() - began, self._gpu.energy_mj()
        total = _total_mj(before, after, watch.powers_mw, elapsed_s)
        idle_mj = None if self._idle_w is None else self._idle_w * elapsed_s * 1e3
        return Energy(
            None if total is None else total / runs,
            None if total is None or idle_mj is None else max(total - idle_mj, 0.0) / runs,
            self._idle_w,
            fmean(watch.clocks_mhz) if watch.clocks_mhz else None,
            tuple(watch.reasons),
        )

    def close(self) -> None:
        self._gpu.close()

    def _idle_watts(self, seconds: float) -> float | None:
        with _Watch(self._gpu) as watch:
            before, began = self._gpu.energy_mj(), perf_counter()
            Event().wait(seconds)
            elapsed_s, after = perf_counter() - began, self._gpu.energy_mj()
        total = _total_mj(before, after, watch.powers_mw, elapsed_s)
        return None if total is None else total / elapsed_s / 1e3


class _Watch:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._over = gpu, Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self.clocks_mhz: list[float] = []
        self.powers_mw: list[float] = []
        self.reasons: dict[str, None] = {}

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(EVERY_S)
            for readings, value in ((self.clocks_mhz, self._gpu.clock_mhz()), (self.powers_mw, self._gpu.power_mw())):
                if value is not None:
                    readings.append(value)
            self.reasons.update(dict.fromkeys(self._gpu.throttle_reasons()))


def open_meter(device: str) -> Meter:
    return Meter(open_gpu(device))


def _block_size(run: Callable[[], object], wait: Callable[[], None]) -> int:
    count = 1
    while True:
        began = perf_counter()
        for _ in range(count):
            run()
        wait()
        took_s = perf_counter() - began
        if took_s >= BLOCK_S:
            return count
        count = ceil(count * min(MOST_GROWTH, 1.2 * BLOCK_S / max(took_s, 1e-9)))


def _total_mj(before: float | None, after: float | None, powers_mw: Sequence[float], elapsed_s: float) -> float | None:
    if before is not None and after is not None:
        return after - before
    return fmean(powers_mw) * elapsed_s if powers_mw else None


# size of the matrices that are multiplied to raise the clock, and seconds of work between synchronizations
SIZE, WARM_UP_BLOCK_S = 1024, 0.01


@cache
def warm_up(device: str, seconds: float) -> None:
    """Keep a GPU busy so that its clock rises; later calls with the same arguments do nothing."""
    # this module is imported to print the help
    import torch

    from opgrip.replay.operators.devices import synchronizer

    if torch.device(device).type == "cpu" or not seconds:
        return
    # lack of memory must not prevent timing
    with suppress(RuntimeError, MemoryError):
        matrix = torch.ones(SIZE, SIZE, device=device)
        wait, end = synchronizer(device), perf_counter() + seconds
        count = 1
        while (began := perf_counter()) < end:
            for _ in range(count):
                torch.mm(matrix, matrix)
            wait()
            count *= 2 if perf_counter() - began < WARM_UP_BLOCK_S else 1


class Clocks:
    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self._read_s = float("-inf")
        self._readings: list[tuple[float | None, list[str]]] = []
        self._spans: dict[tuple[int, int], tuple[int, int]] = {}

    def reading(self, announce: Announce) -> Announce:
        if self._gpu is None:
            return announce
        gpu = self._gpu

        def read_and_announce(number: int, row: int) -> None:
            if perf_counter() - self._read_s > EVERY_S:
                self._readings.append((gpu.clock_mhz(), gpu.throttle_reasons()))
                self._read_s = perf_counter()
            if row != IDLE:
                last = len(self._readings) - 1
                first, _ = self._spans.get((number, row), (last, last))
                self._spans[number, row] = first, last
            announce(number, row)

        return read_and_announce

    def of_row(self, number: int, row: int) -> tuple[float | None, str | None]:
        if (number, row) not in self._spans:
            return None, None
        first, last = self._spans[number, row]
        readings = self._readings[first : last + 1]
        clocks = [clock for clock, _ in readings if clock is not None]
        reasons = dict.fromkeys(reason for _, reasons in readings for reason in reasons)
        return fmean(clocks) if clocks else None, ", ".join(reasons) or None

    @property
    def is_throttled(self) -> bool:
        return bool(self._readings and self._readings[-1][1])

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
