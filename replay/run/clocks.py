"""GPU clocks: raised before timing starts, and read between timed runs."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from statistics import fmean
from time import perf_counter

import torch

from opgrip.platform.nvml import Gpu
from opgrip.replay.operators.devices import synchronizer
from opgrip.replay.timing.rounds import NO_ROW, Announce

EVERY_S = 0.05
"""minimum seconds between two readings, each of which takes up to some milliseconds"""
SIZE, BLOCK_S = 1024, 0.01
"""rows of the matrices that are multiplied to raise the clocks, and seconds of work between synchronizations"""


@cache
def warm_up(device: str, seconds: float) -> None:
    """Keep a device busy, once per process: clocks of an idle device are low and take tenths of a second to rise.

    Does nothing on the CPU.
    """
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
            count *= 2 if perf_counter() - began < BLOCK_S else 1


class Clocks:
    """Readings of a GPU's clock and throttling between timed runs, never during one.

    gpu : None if the GPU cannot be read, or its clock is not needed
    """

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self._read_s = float("-inf")
        self._readings: list[tuple[float | None, list[str]]] = []
        self._spans: dict[tuple[int, int], tuple[int, int]] = {}

    def reading(self, announce: Announce) -> Announce:
        """Return an `announce` function that also reads the GPU if the last reading is older than `EVERY_S`."""
        if self._gpu is None:
            return announce
        gpu = self._gpu

        def read_and_announce(number: int, row: int) -> None:
            if perf_counter() - self._read_s > EVERY_S:
                self._readings.append((gpu.clock_mhz(), gpu.throttle_reasons()))
                self._read_s = perf_counter()
            if row != NO_ROW:
                last = len(self._readings) - 1
                first, _ = self._spans.get((number, row), (last, last))
                self._spans[number, row] = first, last
            announce(number, row)

        return read_and_announce

    def of_row(self, number: int, row: int) -> tuple[float | None, str | None]:
        """Return the mean clock in MHz during a row's runs and the reasons for throttling; None for unknown values.

        number : number of the case
        row : index of the row among the rows of the case
        """
        if (number, row) not in self._spans:
            return None, None
        first, last = self._spans[number, row]
        readings = self._readings[first : last + 1]
        clocks = [clock for clock, _ in readings if clock is not None]
        reasons = dict.fromkeys(reason for _, reasons in readings for reason in reasons)
        return fmean(clocks) if clocks else None, ", ".join(reasons) or None

    def close(self) -> None:
        """Close the GPU."""
        if self._gpu is not None:
            self._gpu.close()
