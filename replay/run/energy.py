"""Energy that a GPU takes while a call runs repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from threading import Event, Thread
from time import perf_counter
from types import TracebackType

from opgrip.cli.options import OUTPUT, option, titled
from opgrip.platform.nvml import Gpu, open_gpu
from opgrip.replay.results.columns import Columns, column

SECONDS = 1.0
"""seconds of runs to measure; the counter changes every few hundredths of a second, so its error is some percent"""
BLOCK_S = 0.1
"""seconds of runs between synchronizations; with shorter blocks the GPU would be idle most of the time"""
IDLE_S = 0.3
"""seconds for which the idle GPU is measured"""
EVERY_S = 0.05
"""seconds between two readings of clock and power by another thread"""
MOST_GROWTH = 10.0


@titled("roofline and energy")
@dataclass(frozen=True, slots=True)
class EnergyOptions:
    """The option that reads the energy counters of a GPU."""

    energy: bool = option(
        False,
        "run each case for one more second on a GPU, and report energy, clock and throttling",
        only=("single cases",),
        role=OUTPUT,
    )

    def check(self, device: str) -> None:
        """Raise `UserError` if energy is requested but the counters cannot be read."""
        if self.energy:
            open_gpu(device).close()


@dataclass(frozen=True, slots=True)
class EnergyColumns(Columns):
    """Energy columns of a row."""

    energy_mj: float | None = column("energy of the GPU for one run, including its idle power", "mJ")
    energy_above_idle_mj: float | None = column("energy above that of an idle GPU in the same time", "mJ")
    idle_w: float | None = column("power of the GPU while nothing ran on it, just before", "W")


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy and clocks of a GPU during the runs of a call; None for values that it does not report.

    millijoules : energy of one run, idle power included
    above_idle_mj : energy of one run without the idle power
    idle_w : power of the idle device
    clock_mhz : mean clock of the multiprocessors during the runs
    throttled : reasons why the clock was lower than possible; empty if there were none
    """

    millijoules: float | None
    above_idle_mj: float | None
    idle_w: float | None
    clock_mhz: float | None
    throttled: tuple[str, ...]

    @property
    def columns(self) -> EnergyColumns:
        """The energy columns of a row; clock and throttling have separate columns."""
        return EnergyColumns(self.millijoules, self.above_idle_mj, self.idle_w)


class Meter:
    """A meter for the energy that calls take of a GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._idle_w: float | None = None

    def measure(
        self, run: Callable[[], object], wait: Callable[[], None], seconds: float = SECONDS, idle_s: float = IDLE_S
    ) -> Energy:
        """Run a call for some time, reading the counters before and after.

        wait : function that waits until the device has finished its work
        seconds : minimum time of the runs
        idle_s : seconds to measure the idle device, on the first use of this meter
        """
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
        """Close NVML."""
        self._gpu.close()

    def _idle_watts(self, seconds: float) -> float | None:
        with _Watch(self._gpu) as watch:
            before, began = self._gpu.energy_mj(), perf_counter()
            Event().wait(seconds)
            elapsed_s, after = perf_counter() - began, self._gpu.energy_mj()
        total = _total_mj(before, after, watch.powers_mw, elapsed_s)
        return None if total is None else total / elapsed_s / 1e3


class _Watch:
    """Readings of clock, power and throttle reasons by a separate thread during a block, and once at its end.

    clocks_mhz, powers_mw : the available readings
    reasons : throttle reasons in the order of their first appearance
    """

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
    """Return the meter of a GPU.

    Raises `UserError` if a GPU, NVML, or permission to use it is missing.
    """
    return Meter(open_gpu(device))


def _block_size(run: Callable[[], object], wait: Callable[[], None]) -> int:
    """Return the number of runs that take `BLOCK_S`."""
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
    """Return the energy by the counter, or by mean power and time without a counter."""
    if before is not None and after is not None:
        return after - before
    return fmean(powers_mw) * elapsed_s if powers_mw else None
