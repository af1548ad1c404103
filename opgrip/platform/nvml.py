"""GPU limits, energy, power and clock from NVML, without starting CUDA."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from opgrip.errors import UserError

IDLE = ("GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks")
"""reasons for a lower clock that do not count as throttling: an idle GPU, and the user's settings"""
REASONS = (
    *IDLE,
    *("SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown"),
    "DisplayClockSetting",
)
"""names of NVML bits, with the prefix `nvmlClocksEventReason` or, in older versions, `nvmlClocksThrottleReason`"""
KINDS = ("GPU", "MIG")
"""prefixes of device identifiers: whole GPUs and MIG instances"""


class Gpu:
    """Counters of a GPU. A reading is None if the GPU, its driver or its virtual machine does not support it.

    Parameters
    ----------
    nvml : the module `pynvml`, initialized
    handle : handle of a GPU, or of a MIG instance, whose clock is that of the whole GPU
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        is_instance = self._read("nvmlDeviceIsMigDeviceHandle", handle)
        whole = self._read("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if is_instance else None
        self._whole = handle if whole is None else whole

    def energy_mj(self) -> float | None:
        """Return the energy since the driver was loaded; None for older GPUs and MIG instances."""
        return _number(self._read("nvmlDeviceGetTotalEnergyConsumption", self._handle))

    def power_mw(self) -> float | None:
        """Return the current power; on some GPUs, the mean of the last second."""
        return _number(self._read("nvmlDeviceGetPowerUsage", self._handle))

    def clock_mhz(self) -> float | None:
        """Return the clock of the multiprocessors."""
        return _number(self._read("nvmlDeviceGetClockInfo", self._whole, getattr(self._nvml, "NVML_CLOCK_SM", 1)))

    def free_bytes(self) -> int | None:
        """Return the free memory."""
        memory = self._read("nvmlDeviceGetMemoryInfo", self._handle)
        return None if memory is None else int(memory.free)

    def throttle_reasons(self) -> list[str]:
        """Return the reasons why the clock is throttled."""
        mask = self._read("nvmlDeviceGetCurrentClocksEventReasons", self._whole)
        if mask is None:
            mask = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", self._whole)
        return [name for name in REASONS if name not in IDLE and int(mask or 0) & self._bit(name)]

    def limits(self) -> dict[str, float | bool]:
        """Return the values that do not change while programs run, by their names in traces."""
        readings = {
            "power_limit_w": _scaled(self._read("nvmlDeviceGetEnforcedPowerLimit", self._whole), 1e-3),
            "max_sm_mhz": self._max_clock_mhz("NVML_CLOCK_SM", 1),
            "max_memory_mhz": self._max_clock_mhz("NVML_CLOCK_MEM", 2),
            "ecc": _is_on(self._read("nvmlDeviceGetEccMode", self._whole)),
            "mig": _is_on(self._read("nvmlDeviceGetMigMode", self._whole)),
        }
        return {name: value for name, value in readings.items() if value is not None}

    def versions(self) -> dict[str, str]:
        """Return the versions of the driver and of the newest CUDA that it supports."""
        driver = self._read("nvmlSystemGetDriverVersion")
        newest = self._read("nvmlSystemGetCudaDriverVersion_v2")
        # older versions of the package return bytes
        texts = {
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "driver_cuda": None if newest is None else f"{newest // 1000}.{newest % 1000 // 10}",
        }
        return {name: text for name, text in texts.items() if text is not None}

    def close(self) -> None:
        """Shut NVML down."""
        self._read("nvmlShutdown")

    def _read(self, name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] | None = getattr(self._nvml, name, None)
        try:
            return None if function is None else function(*arguments)
        except self._nvml.NVMLError:
            return None

    def _max_clock_mhz(self, name: str, number: int) -> float | None:
        return _number(self._read("nvmlDeviceGetMaxClockInfo", self._whole, getattr(self._nvml, name, number)))

    def _bit(self, name: str) -> int:
        bits = (getattr(self._nvml, f"nvmlClocks{kind}Reason{name}", None) for kind in ("Event", "Throttle"))
        return next((int(bit) for bit in bits if bit is not None), 0)


def open_gpu(device: str) -> Gpu:
    """Return the counters of a GPU.

    Raises
    ------
    UserError : if the device is not an NVIDIA GPU, NVML is missing, or access is not permitted
    """
    if device.partition(":")[0] != "cuda":
        raise UserError(f"--energy reads the counters of an NVIDIA GPU, and {device} is none", "leave it out")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise UserError("--energy needs pynvml", "pip install opgrip[gpu]") from error
    try:
        nvml.nvmlInit()
        return Gpu(nvml, _handle(nvml, device))
    except nvml.NVMLError as error:
        raise UserError(f"NVML does not report {device}: {error}", "see nvidia-smi -q") from error


def find_gpu(device: str) -> Gpu | None:
    """Return the counters of a GPU, or None if they cannot be read."""
    try:
        return open_gpu(device)
    except UserError:
        return None


def _handle(nvml: Any, device: str) -> Any:
    """Return the handle of a device by its UUID, because CUDA numbers only visible devices and NVML numbers all."""
    import torch

    uuid = torch.cuda.get_device_properties(device).uuid
    problem = None
    for kind in KINDS:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
        except nvml.NVMLError as error:  # noqa: PERF203 - two at most
            problem = problem or error
    assert problem is not None, "there are several kinds"
    raise problem


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _scaled(value: Any, factor: float) -> float | None:
    return None if value is None else float(value) * factor


def _is_on(modes: Any) -> bool | None:
    """Return the current state from a pair of current and pending state."""
    return None if modes is None else bool(modes[0])
