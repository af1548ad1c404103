"""Fake of the module `pynvml`: a GPU with constant power when busy, and lower power when idle."""

from __future__ import annotations

from threading import current_thread, main_thread
from time import perf_counter, sleep
from types import SimpleNamespace

IDLE_W, BUSY_W = 60.0, 300.0
UUID = "5b1b9e8a-0000-0000-0000-000000000001"


class NVMLError(Exception):
    """Error class of NVML."""


class Nvml:
    """NVML as documented, for a GPU whose clock is limited by its power cap.

    lacks : functions that this GPU does not support
    query_s : duration of a reading

    readings : functions that the main thread called
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    nvmlClocksEventReasonGpuIdle = 1
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonHwSlowdown = 8

    def __init__(self, *lacks: str, query_s: float = 0.0, kind: str = "GPU") -> None:
        self.lacks, self.query_s, self.kind = lacks, query_s, kind
        self.busy_s, self.closed, self.readings = 0.0, False, list[str]()
        self._began = perf_counter()

    def run(self, seconds: float = 1e-3) -> None:
        """Keep the GPU busy, as a call does."""
        began = perf_counter()
        sleep(seconds)
        self.busy_s += perf_counter() - began

    def nvmlInit(self) -> None:
        self._ask("nvmlInit")

    def nvmlShutdown(self) -> None:
        self.closed = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"{self.kind}-{UUID}":
            raise NVMLError("not found")
        return uuid

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> int:
        return int(handle.startswith("MIG"))

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return "GPU"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        elapsed_s = perf_counter() - self._began
        return int(1e3 * (IDLE_W * elapsed_s + (BUSY_W - IDLE_W) * self.busy_s))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._ask("nvmlDeviceGetPowerUsage", handle)
        return int(IDLE_W * 1e3)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        self._ask("nvmlDeviceGetClockInfo", handle)
        assert kind == self.NVML_CLOCK_SM
        return 1500

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        self._ask("nvmlDeviceGetMaxClockInfo", handle)
        return {self.NVML_CLOCK_SM: 1980, self.NVML_CLOCK_MEM: 3201}[kind]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        return 700_000

    def nvmlDeviceGetEccMode(self, handle: str) -> list[int]:
        self._ask("nvmlDeviceGetEccMode", handle)
        return [1, 1]

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        self._ask("nvmlDeviceGetMigMode", handle)
        return [int(self.kind == "MIG"), 1]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        if "nvmlDeviceGetMemoryInfo" in self.lacks:
            raise NVMLError("not supported")
        return SimpleNamespace(total=80 * 10**9, free=5 * 10**9, used=75 * 10**9)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        return 1 | 4

    def _ask(self, name: str, handle: str = "GPU") -> None:
        if current_thread() is main_thread():
            self.readings.append(name)
        sleep(self.query_s)
        # an instance of a shared GPU has no counters
        if name in self.lacks or handle.startswith("MIG"):
            raise NVMLError("not supported")


def properties_of(device: str) -> SimpleNamespace:
    """Return the properties of the GPU that torch reports."""
    return SimpleNamespace(uuid=UUID)
