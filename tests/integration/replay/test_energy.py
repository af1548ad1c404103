"""Tests of energy and clocks of a GPU, without a GPU: a stand-in for NVML counts energy."""

from __future__ import annotations

import sys
from itertools import chain, repeat
from pathlib import Path
from time import perf_counter

import pytest
import torch
from nvml import BUSY_W, IDLE_W, Nvml, properties_of
from settings import rows_of, settings_of

from opgrip.errors import UserError
from opgrip.platform.machine import Gpu, find_gpu, open_gpu
from opgrip.replay.command.replay_options import request_with
from opgrip.replay.results.results import OK
from opgrip.replay.run import energy, measure
from opgrip.replay.run import measure as metering
from opgrip.replay.run.energy import EnergyColumns, Meter, open_meter
from opgrip.replay.run.workload import load_workload

COUNTER = "nvmlDeviceGetTotalEnergyConsumption"
POWER, CLOCK = "nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo"
REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
QUICK = {"seconds": 0.3, "idle_s": 0.1}


def nothing() -> None:
    pass


def test_energy_of_a_busy_gpu_is_correct_if_readings_are_slow() -> None:
    nvml = Nvml(query_s=0.02)
    runs = list[float]()

    def run() -> None:
        nvml.run()
        runs.append(perf_counter())

    energy = Meter(Gpu(nvml, "GPU")).measure(run, nothing, **QUICK)
    busy_mj = BUSY_W * nvml.busy_s / len(runs) * 1e3
    above_idle_mj = busy_mj * (1 - IDLE_W / BUSY_W)
    assert energy.millijoules is not None
    assert energy.above_idle_mj is not None
    assert 0.8 * busy_mj < energy.millijoules < 1.25 * busy_mj
    assert 0.7 * above_idle_mj < energy.above_idle_mj < 1.25 * above_idle_mj
    assert energy.idle_w == pytest.approx(IDLE_W, rel=0.25)
    assert (energy.clock_mhz, energy.throttled) == (1500, ("SwPowerCap",))


def test_energy_is_power_times_time_without_an_energy_counter() -> None:
    nvml = Nvml(COUNTER)
    energy = Meter(Gpu(nvml, "GPU")).measure(nvml.run, nothing, **QUICK)
    assert energy.millijoules is not None
    # the stand-in reports idle power, and a run takes a millisecond or more
    assert energy.millijoules > IDLE_W * 0.9
    assert energy.idle_w == pytest.approx(IDLE_W)


@pytest.mark.parametrize("lacks", [(CLOCK,), (COUNTER, POWER, REASONS)])
def test_values_that_a_virtual_machine_hides_are_empty(lacks: tuple[str, ...]) -> None:
    nvml = Nvml(*lacks)
    energy = Meter(Gpu(nvml, "GPU")).measure(nvml.run, nothing, seconds=0.0, idle_s=0.06)
    assert (energy.clock_mhz is None) is (CLOCK in lacks)
    assert (energy.throttled == ()) is (REASONS in lacks)
    assert (energy.millijoules is None) is (energy.idle_w is None) is (energy.above_idle_mj is None)
    assert (energy.millijoules is None) is (COUNTER in lacks and POWER in lacks)


def test_mig_instance_has_the_clock_of_the_gpu_and_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(kind="MIG")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)
    gpu = open_gpu("cuda:0")
    assert (gpu.clock_mhz(), gpu.throttle_reasons()) == (1500, ["SwPowerCap"])
    assert (gpu.energy_mj(), gpu.power_mw()) == (None, None)
    gpu.close()
    assert nvml.closed


def test_missing_nvml_reports_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UserError, match="--energy needs pynvml: pip install 'nvidia-ml-py"):
        open_meter("cuda:0")
    assert find_gpu("cuda:0") is None


@pytest.mark.slow
def test_rows_remain_ok_if_the_meter_returns_nothing(tiny_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = load_workload(request_with(tiny_trace, top=1)).cases
    settings = settings_of(iterations=2, warmup=0, cache="warm", energy=True)
    monkeypatch.setattr(metering, "open_meter", lambda device: Meter(Gpu(Nvml(COUNTER, POWER, CLOCK, REASONS), "GPU")))
    [row] = rows_of(cases, settings)
    assert (row.status, row.clock_mhz, EnergyColumns.of(row).energy_mj) == (OK, None, None)

    def unreachable(device: str) -> Meter:
        raise UserError(f"NVML does not report {device}", "see nvidia-smi -q")

    monkeypatch.setattr(metering, "open_meter", unreachable)
    [row] = rows_of(cases, settings)
    assert (row.status, row.added) == (OK, {})


def test_rows_have_the_clock_at_which_they_were_timed(tiny_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(measure, "find_gpu", lambda device: Gpu(nvml, "GPU"))
    rows = rows_of(load_workload(request_with(tiny_trace, top=3)).cases, settings_of(iterations=2, warmup=0))
    assert {(row.status, row.clock_mhz, row.throttled) for row in rows} == {(OK, 1500, "SwPowerCap")}
    assert nvml.closed
    # the clock was throttled all the time
    assert {row.slowed for row in rows} == {1.0}
    assert all("slowed" in row.doubts for row in rows)


def test_runs_with_a_throttled_clock_are_discarded(tiny_trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    reasons = chain([4, 4, 4], repeat(0))
    monkeypatch.setattr(nvml, REASONS, lambda handle: next(reasons))
    monkeypatch.setattr(measure, "find_gpu", lambda device: Gpu(nvml, "GPU"))
    monkeypatch.setattr(energy, "EVERY_S", 0.0)
    [row] = rows_of(load_workload(request_with(tiny_trace, top=1)).cases, settings_of(iterations=5, cache="warm"))
    assert (row.samples, row.throttled) == (5, "SwPowerCap")
    assert row.dropped >= 3
