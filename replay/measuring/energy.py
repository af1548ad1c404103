"""Energy, clock and throttling of a GPU while a call runs again and again, by NVML."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from opgrip.replay.measuring.columns import Columns, column
from opgrip.traces.errors import UserError
from opgrip.traces.options import option, titled

SECONDS = 1.0
"""Of runs: the counter moves every few hundredths of a second, so that a block gives it within some percent."""
FEWEST = 10
"""Runs between two looks at the clock."""
IDLE = ("GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks")
"""Reasons for a lower clock that are no throttling: nothing to do, and what the user asked for."""
REASONS = (
    *IDLE,
    *("SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown"),
    "DisplayClockSetting",
)
"""Names of NVML's bits, in `nvmlClocksEventReason...` and in older versions `nvmlClocksThrottleReason...`."""


@titled("the machine's limits")
@dataclass(frozen=True, slots=True)
class EnergyOptions:
    """Whether the counters of a GPU are read."""

    energy: bool = option(
        False,
        "run each case for a second more on a GPU: its energy, clock, throttling",
        only=("single cases",),
    )

    def check(self, device: str) -> None:
        """Raise `UserError` where they are asked for and cannot be read."""
        if self.energy:
            open_meter(device).close()


@dataclass(frozen=True, slots=True)
class EnergyColumns(Columns):
    """What a run takes of a GPU."""

    energy_mj: float | None = column("of the GPU for one run, with what it takes when idle", "mJ")
    clock_mhz: float | None = column("mean clock of its multiprocessors meanwhile", "MHz")
    throttled: str | None = column("why that was not higher; empty where nothing held it down")


@dataclass(frozen=True, slots=True)
class Energy:
    """What a run of a call takes of the device.

    Attributes
    ----------
    millijoules : of one run, with what the device takes when idle
    clock_mhz : mean clock of the multiprocessors meanwhile
    throttled : reasons why it was lower than it could be; empty where there were none
    """

    millijoules: float
    clock_mhz: float
    throttled: tuple[str, ...]


class Meter:
    """Reads a GPU's counters.

    Parameters
    ----------
    nvml : the module `pynvml`, initialized
    handle : of the GPU
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def measure(self, run: Callable[[], object], wait: Callable[[], None], seconds: float = SECONDS) -> Energy:
        """Run a call for some time, and read the counters before, between and after.

        Parameters
        ----------
        wait : until the device has done what it was given
        """
        wait()
        clocks: list[float] = []
        powers: list[float] = []
        reasons: dict[str, None] = {}
        runs, began, before = 0, perf_counter(), self._counted_mj()
        while not runs or perf_counter() - began < seconds:
            for _ in range(FEWEST):
                run()
            runs += FEWEST
            wait()
            clocks.append(self._clock_mhz())
            powers.append(self._power_mw())
            reasons.update(dict.fromkeys(self._reasons()))
        after, elapsed_s = self._counted_mj(), perf_counter() - began
        total = _difference(before, after)
        if total is None:
            # older GPUs count no energy: mW over seconds
            total = sum(powers) / len(powers) * elapsed_s
        return Energy(total / runs, sum(clocks) / len(clocks), tuple(reasons))

    def close(self) -> None:
        """Let go of NVML."""
        self._nvml.nvmlShutdown()

    def _counted_mj(self) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError:
            return None

    def _power_mw(self) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle))
        except self._nvml.NVMLError:
            return float("nan")

    def _clock_mhz(self) -> float:
        return float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def _reasons(self) -> list[str]:
        nvml = self._nvml
        read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        read = read or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        try:
            mask = int(read(self._handle))
        except nvml.NVMLError:
            return []
        return [name for name in REASONS if name not in IDLE and mask & _bit(nvml, name)]


def open_meter(device: str) -> Meter:
    """The meter of a GPU.

    Raises
    ------
    UserError : where there is no GPU, no NVML, or no permission
    """
    import torch

    if torch.device(device).type != "cuda":
        raise UserError(f"--energy reads the counters of an NVIDIA GPU, and {device} is none", "leave it out")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise UserError("--energy needs pynvml", "pip install opgrip[gpu]") from error
    try:
        nvml.nvmlInit()
        # by identity: CUDA counts the devices that it is let see, NVML all
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return Meter(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        raise UserError(f"NVML does not tell of {device}: {error}", "see nvidia-smi -q") from error


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _bit(nvml: Any, name: str) -> int:
    bits = (getattr(nvml, f"nvmlClocks{kind}Reason{name}", None) for kind in ("Event", "Throttle"))
    return next((int(bit) for bit in bits if bit is not None), 0)
