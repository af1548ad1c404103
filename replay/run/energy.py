"""Energy of a GPU while a call runs again and again."""

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
"""Of runs: the counter moves every few hundredths of a second, so that a block gives it within some percent."""
BLOCK_S = 0.1
"""Of runs between which nothing is asked and nothing waited for: else the GPU idles most of the time."""
IDLE_S = 0.3
"""For which an idle GPU is watched."""
EVERY_S = 0.05
"""Between two readings of clock and power, by another thread."""
MOST_GROWTH = 10.0


@titled("the machine's limits")
@dataclass(frozen=True, slots=True)
class EnergyOptions:
    """Whether the counters of a GPU are read."""

    energy: bool = option(
        False,
        "run each case for a second more on a GPU: its energy, and clock and throttling meanwhile",
        only=("single cases",),
        role=OUTPUT,
    )

    def check(self, device: str) -> None:
        """Raise `UserError` where they are asked for and cannot be read."""
        if self.energy:
            open_gpu(device).close()


@dataclass(frozen=True, slots=True)
class EnergyColumns(Columns):
    """What a run takes of a GPU."""

    energy_mj: float | None = column("of the GPU for one run, with what it takes when idle", "mJ")
    energy_above_idle_mj: float | None = column("of that, what an idle GPU would not have taken in the time", "mJ")
    idle_w: float | None = column("power of the GPU while nothing ran on it, just before", "W")


@dataclass(frozen=True, slots=True)
class Energy:
    """What a run of a call takes of the device; None for what it does not tell.

    Attributes
    ----------
    millijoules : of one run, with what the device takes when idle
    above_idle_mj : without that
    idle_w : power of the idle device
    clock_mhz : mean clock of the multiprocessors meanwhile
    throttled : reasons why it was lower than it could be; empty where there were none
    """

    millijoules: float | None
    above_idle_mj: float | None
    idle_w: float | None
    clock_mhz: float | None
    throttled: tuple[str, ...]

    @property
    def columns(self) -> EnergyColumns:
        """What a row gets of it, besides clock and throttling."""
        return EnergyColumns(self.millijoules, self.above_idle_mj, self.idle_w)


class Meter:
    """Measures what calls take of a GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._idle_w: float | None = None

    def measure(
        self, run: Callable[[], object], wait: Callable[[], None], seconds: float = SECONDS, idle_s: float = IDLE_S
    ) -> Energy:
        """Run a call for some time, with the counters read before and after.

        Parameters
        ----------
        wait : until the device has done what it was given
        idle_s : how long the idle device is watched, where this meter has not done so yet
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
        """Let go of NVML."""
        self._gpu.close()

    def _idle_watts(self, seconds: float) -> float | None:
        with _Watch(self._gpu) as watch:
            before, began = self._gpu.energy_mj(), perf_counter()
            Event().wait(seconds)
            elapsed_s, after = perf_counter() - began, self._gpu.energy_mj()
        total = _total_mj(before, after, watch.powers_mw, elapsed_s)
        return None if total is None else total / elapsed_s / 1e3


class _Watch:
    """Reads clock, power and reasons while a block runs, by a thread of its own, and once at the end.

    Attributes
    ----------
    clocks_mhz, powers_mw : as far as there are any
    reasons : in the order in which they came up
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
    """The meter of a GPU.

    Raises
    ------
    UserError : where there is no GPU, no NVML, or no permission
    """
    return Meter(open_gpu(device))


def _block_size(run: Callable[[], object], wait: Callable[[], None]) -> int:
    """How many runs take `BLOCK_S`."""
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
    """By the counter; by power and time where there is none."""
    if before is not None and after is not None:
        return after - before
    return fmean(powers_mw) * elapsed_s if powers_mw else None
