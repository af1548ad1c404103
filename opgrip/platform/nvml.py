"""What a GPU says of itself by NVML, which starts no CUDA: its limits, and energy, power and clock at a time."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from opgrip.errors import UserError

IDLE = ("GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks")
"""Reasons for a lower clock that are no throttling: nothing to do, and what the user asked for."""
REASONS = (
    *IDLE,
    *("SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown"),
    "DisplayClockSetting",
)
"""Names of NVML's bits, in `nvmlClocksEventReason...` and in older versions `nvmlClocksThrottleReason...`."""
KINDS = ("GPU", "MIG")
"""What the names of devices begin with: whole GPUs, and instances of one that is shared out."""


class Gpu:
    """A GPU's counters; each reading is None where this GPU, its driver or its virtual machine does not have it.

    Parameters
    ----------
    nvml : the module `pynvml`, initialized
    handle : of the GPU, or of an instance of one, which has the clock of the whole
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        is_instance = self._read("nvmlDeviceIsMigDeviceHandle", handle)
        whole = self._read("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if is_instance else None
        self._whole = handle if whole is None else whole

    def energy_mj(self) -> float | None:
        """Since the driver was loaded; older GPUs count none, and instances of a shared one neither."""
        return _number(self._read("nvmlDeviceGetTotalEnergyConsumption", self._handle))

    def power_mw(self) -> float | None:
        """What it takes now; of some GPUs the mean of the last second."""
        return _number(self._read("nvmlDeviceGetPowerUsage", self._handle))

    def clock_mhz(self) -> float | None:
        """Of its multiprocessors."""
        return _number(self._read("nvmlDeviceGetClockInfo", self._whole, getattr(self._nvml, "NVML_CLOCK_SM", 1)))

    def free_bytes(self) -> int | None:
        """Of its memory, that no program has now."""
        memory = self._read("nvmlDeviceGetMemoryInfo", self._handle)
        return None if memory is None else int(memory.free)

    def throttle_reasons(self) -> list[str]:
        """Why the clock is lower than it could be."""
        mask = self._read("nvmlDeviceGetCurrentClocksEventReasons", self._whole)
        if mask is None:
            mask = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", self._whole)
        return [name for name in REASONS if name not in IDLE and int(mask or 0) & self._bit(name)]

    def limits(self) -> dict[str, float | bool]:
        """What does not change while programs run, by the names that traces have for it."""
        readings = {
            "power_limit_w": _scaled(self._read("nvmlDeviceGetEnforcedPowerLimit", self._whole), 1e-3),
            "max_sm_mhz": self._max_clock_mhz("NVML_CLOCK_SM", 1),
            "max_memory_mhz": self._max_clock_mhz("NVML_CLOCK_MEM", 2),
            "ecc": _is_on(self._read("nvmlDeviceGetEccMode", self._whole)),
            "mig": _is_on(self._read("nvmlDeviceGetMigMode", self._whole)),
        }
        return {name: value for name, value in readings.items() if value is not None}

    def versions(self) -> dict[str, str]:
        """Of the driver, and the newest CUDA that it runs."""
        driver = self._read("nvmlSystemGetDriverVersion")
        newest = self._read("nvmlSystemGetCudaDriverVersion_v2")
        # older versions of the package give bytes
        texts = {
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "driver_cuda": None if newest is None else f"{newest // 1000}.{newest % 1000 // 10}",
        }
        return {name: text for name, text in texts.items() if text is not None}

    def close(self) -> None:
        """Let go of NVML."""
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
    """The counters of a GPU.

    Raises
    ------
    UserError : where there is no GPU, no NVML, or no permission
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
        raise UserError(f"NVML does not tell of {device}: {error}", "see nvidia-smi -q") from error


def find_gpu(device: str) -> Gpu | None:
    """The same; None where nothing tells of it."""
    try:
        return open_gpu(device)
    except UserError:
        return None


def _handle(nvml: Any, device: str) -> Any:
    """By identity: CUDA counts the devices that it is let see, NVML all."""
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
    """Whether what is now, of a pair with what will be after a restart, is on."""
    return None if modes is None else bool(modes[0])
