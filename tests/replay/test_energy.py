"""Energy and clocks. No GPU is needed: a stand-in for NVML counts what a GPU of constant power would."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter

import pytest

from opgrip.replay.measuring.energy import Meter, open_meter
from opgrip.traces.errors import UserError

WATTS = 200.0


class Nvml:
    """NVML as its documentation has it, of a GPU that takes 200 W and is throttled by its power cap."""

    NVML_CLOCK_SM = 1
    nvmlClocksEventReasonGpuIdle = 1
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonHwSlowdown = 8

    class NVMLError(Exception):
        pass

    def __init__(self, counts: bool = True) -> None:
        self.counts, self.closed = counts, False

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        if not self.counts:
            raise self.NVMLError("not supported")
        return int(perf_counter() * WATTS * 1e3)

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:
        return int(WATTS * 1e3)

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        assert kind == self.NVML_CLOCK_SM
        return 1500

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: object) -> int:
        return 1 | 4

    def nvmlShutdown(self) -> None:
        self.closed = True


class OldNvml(Nvml):
    """One that calls the reasons for a lower clock by their older names."""

    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlDeviceGetCurrentClocksEventReasons = None  # type: ignore[assignment]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object) -> int:
        return 32


@pytest.mark.parametrize("counts", [True, False], ids=["by the counter", "by power and time"])
def test_energy_is_that_of_one_run(counts: bool) -> None:
    runs: list[float] = []
    nvml = Nvml(counts)
    meter = Meter(nvml, object())
    began = perf_counter()
    energy = meter.measure(lambda: runs.append(perf_counter()), lambda: None, seconds=0.02)
    taken = perf_counter() - began
    # all that was taken, by all runs
    assert 0 < energy.millijoules * len(runs) <= taken * WATTS * 1e3 * 1.01
    assert energy.millijoules * len(runs) >= 0.02 * WATTS * 1e3 * 0.9
    assert energy.clock_mhz == 1500
    assert energy.throttled == ("SwPowerCap",)
    meter.close()
    assert nvml.closed


def test_older_names_of_reasons_are_known() -> None:
    energy = Meter(OldNvml(), object()).measure(lambda: None, lambda: None, seconds=0.0)
    assert energy.throttled == ("SwThermalSlowdown",)


def test_without_nvml_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UserError, match=r"--energy needs pynvml: pip install opgrip\[gpu\]"):
        open_meter("cuda:0")
