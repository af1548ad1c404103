"""The machine: its processors, devices and free memory, and a cache of measured speeds."""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.cli.output_files import write_json
from opgrip.cli.plugins import install_command
from opgrip.errors import UserError, cause_of

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")
USUAL_CACHE = 32 << 20  # cache size in bytes if the system does not report one
LARGEST_PAGE = 1 << 30
SHARE_OF_FREE = 0.9  # share of free memory that cases may use


def page_size(header: Mapping[str, Any]) -> int | None:
    page = header.get("page_size")
    return page if type(page) is int and 0 < page <= LARGEST_PAGE else None


def cache_folder() -> Path:
    """Return the folder for compiled code and measured speeds, by default `opgrip` in the user's cache folder."""
    folder = os.environ.get("OPGRIP_CACHE")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "opgrip"


def processor(device: str) -> list[str]:
    """Return properties of a device that compiled code depends on, such as its name."""
    import torch

    module = _module_of(device)
    if module is not None:
        return [str(getattr(module, "get_device_name", str)(device))]
    return [platform.machine(), _processor_name(), torch.backends.cpu.get_cpu_capability()]


def describe_processors() -> str:
    return f"{_processor_name() or platform.processor() or platform.machine()}, {os.cpu_count()} logical cores"


def _processor_name() -> str:
    names = (line.split(":", 1)[1].strip() for line in lines("/proc/cpuinfo") if line.startswith("model name"))
    return next(names, "")


def last_cache_bytes(device: str) -> int:
    """Return the size of a device's last-level cache, or a usual size if it is unknown."""
    module = _module_of(device)
    if module is not None:
        properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
        sizes = (int(getattr(properties, name, 0)) for name in ("L2_cache_size", "last_level_cache_size"))
        return max(sizes) or USUAL_CACHE
    # this is the size of one instance; sysconf reports the sum of all
    for index in (3, 2):
        text = "".join(lines(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size"))
        if text.endswith("K") and text[:-1].isdigit():
            return int(text[:-1]) << 10
    names = [name for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE") if name in os.sysconf_names]
    return next((size for size in map(os.sysconf, names) if size > 0), USUAL_CACHE)


def available_memory(device: str) -> int | None:
    """Return the number of bytes that replayed cases may use on a device, None if unknown."""
    free = free_memory(device)
    return None if free is None else int(SHARE_OF_FREE * free)


def free_memory(device: str) -> int | None:
    module = _module_of(device)
    if module is not None:
        return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else None
    return min((value for value in (_meminfo(), _cgroup()) if value is not None), default=None)


def _module_of(device: str) -> Any:
    import torch

    kind = torch.device(device).type
    return None if kind in ("cpu", "meta") else getattr(torch, kind)


def _meminfo() -> int | None:
    for line in lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _cgroup() -> int | None:
    # cached file pages do not count, because the kernel frees them when memory is short
    most, used, stat = (lines(str(CGROUP / f"memory.{name}")) for name in ("max", "current", "stat"))
    if not most or not used or not most[0].isdigit():
        return None
    idle = next((int(line.split()[1]) for line in stat if line.startswith("inactive_file ")), 0)
    return max(0, int(most[0]) - max(0, int(used[0]) - idle))


def lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def parse_device(name: str) -> torch.device:
    import torch

    unknown = UserError(f"{name!r} is not a device known to torch", "name one such as cpu, cuda or cuda:1")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown from error
    # torch keeps eight bits of an index, so that cuda:256 becomes cuda:0
    if name.partition(":")[2] not in ("", str(device.index)):
        raise unknown
    return device


def check_device(name: str) -> torch.device:
    import torch

    device = parse_device(name)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
        kind = name if ":" in name else device.type.upper()
        problem = f"no {kind} device here: {cause_of(error)}"
        raise UserError(problem, "choose another with --device, such as cpu") from error
    return device


def measure_once(what: str, device: str, measure: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """Return the result of `measure`, or the result that an earlier call stored on this machine."""
    import torch

    key = [what, device, *processor(device), f"{torch.get_num_threads()} threads", f"torch {torch.__version__}"]
    path, name = cache_folder() / "measured.json", ", ".join(key)
    numbers_by_name = _read_cache(path)
    if name not in numbers_by_name:
        numbers_by_name[name] = list(map(float, measure()))
        # if the folder is not writable, they are measured again next time
        with suppress(OSError, UserError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(numbers_by_name, path, force=True)
    return tuple(numbers_by_name[name])


def _read_cache(path: Path) -> dict[str, list[float]]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    pairs = content.items() if isinstance(content, dict) else ()
    return {name: values for name, values in pairs if _is_numbers(values)}


def _is_numbers(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(item, float) and item >= 0 for item in values)


# reasons for a lower clock that do not count as throttling: an idle GPU, and the user's settings
IDLE = ("GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks")
# names of NVML's throttle reasons without prefix (`nvmlClocksEventReason`; in older versions
# `nvmlClocksThrottleReason`)
REASONS = (
    *IDLE,
    *("SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown"),
    "DisplayClockSetting",
)
KINDS = ("GPU", "MIG")  # prefixes of device identifiers: whole GPUs and MIG instances


class Gpu:
    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        is_instance = self._read("nvmlDeviceIsMigDeviceHandle", handle)
        whole = self._read("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if is_instance else None
        self._whole = handle if whole is None else whole

    def energy_mj(self) -> float | None:
        """Return the energy used since the GPU's driver was loaded."""
        return _number(self._read("nvmlDeviceGetTotalEnergyConsumption", self._handle))

    def power_mw(self) -> float | None:
        """Return the power that the GPU uses now; on some GPUs, the mean over the last second."""
        return _number(self._read("nvmlDeviceGetPowerUsage", self._handle))

    def clock_mhz(self) -> float | None:
        return _number(self._read("nvmlDeviceGetClockInfo", self._whole, getattr(self._nvml, "NVML_CLOCK_SM", 1)))

    def free_bytes(self) -> int | None:
        memory = self._read("nvmlDeviceGetMemoryInfo", self._handle)
        return None if memory is None else int(memory.free)

    def throttle_reasons(self) -> list[str]:
        """Return NVML's names of the reasons why the GPU's clock is lowered now."""
        mask = self._read("nvmlDeviceGetCurrentClocksEventReasons", self._whole)
        if mask is None:
            mask = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", self._whole)
        return [name for name in REASONS if name not in IDLE and int(mask or 0) & self._bit(name)]

    def limits(self) -> dict[str, float | bool]:
        readings = {
            "power_limit_w": _number(self._read("nvmlDeviceGetEnforcedPowerLimit", self._whole), 1e-3),
            "max_sm_mhz": self._max_clock_mhz("NVML_CLOCK_SM", 1),
            "max_memory_mhz": self._max_clock_mhz("NVML_CLOCK_MEM", 2),
            "ecc": _is_on(self._read("nvmlDeviceGetEccMode", self._whole)),
            "mig": _is_on(self._read("nvmlDeviceGetMigMode", self._whole)),
        }
        return {name: value for name, value in readings.items() if value is not None}

    def versions(self) -> dict[str, str]:
        driver = self._read("nvmlSystemGetDriverVersion")
        newest = self._read("nvmlSystemGetCudaDriverVersion_v2")
        # older versions of the package return bytes
        texts = {
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "driver_cuda": None if newest is None else f"{newest // 1000}.{newest % 1000 // 10}",
        }
        return {name: text for name, text in texts.items() if text is not None}

    def close(self) -> None:
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
    if device.partition(":")[0] != "cuda":
        raise UserError(f"--energy needs an NVIDIA GPU, and {device} is not one", "remove --energy")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise UserError("--energy needs pynvml", install_command("gpu")) from error
    try:
        nvml.nvmlInit()
        return Gpu(nvml, _handle(nvml, device))
    except nvml.NVMLError as error:
        raise UserError(f"NVML does not report {device}: {error}", "see nvidia-smi -q") from error


def find_gpu(device: str) -> Gpu | None:
    try:
        return open_gpu(device)
    except UserError:
        return None


def _handle(nvml: Any, device: str) -> Any:
    # found by UUID: CUDA counts only the devices that the process sees, NVML all
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


def _number(value: Any, factor: float = 1.0) -> float | None:
    return None if value is None else float(value) * factor


def _is_on(modes: Any) -> bool | None:
    return None if modes is None else bool(modes[0])
