"""Fake of the module `pynvml`: a GPU with constant power when busy, and lower power when idle."""

from collections.abc import Callable
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any

IDLE_W, BUSY_W = 60.0, 300.0
UUID = "5b1b9e8a-0000-0000-0000-000000000001"


class NVMLError(Exception):
    """Error class of NVML."""


SM, MEM = 1, 2  # clocks
# answers of functions that are constant, by clock if it has several
ANSWERS = {
    "nvmlInit": None,
    "nvmlDeviceGetPowerUsage": int(IDLE_W * 1e3),
    "nvmlDeviceGetClockInfo": {SM: 1500},
    "nvmlDeviceGetMaxClockInfo": {SM: 1980, MEM: 3201},
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetEccMode": [1, 1],
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * 10**9, free=5 * 10**9, used=75 * 10**9),
    "nvmlSystemGetDriverVersion": "550.54.15",
    "nvmlSystemGetCudaDriverVersion_v2": 12040,
    "nvmlDeviceGetCurrentClocksEventReasons": 1 | 4,
}


class Nvml:
    """NVML as documented, for a GPU whose clock is limited by its power cap.

    lacks : functions that this GPU does not support
    query_s : duration of a reading
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = SM, MEM
    nvmlClocksEventReasonGpuIdle = 1
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonHwSlowdown = 8

    def __init__(self, *lacks: str, query_s: float = 0.0, kind: str = "GPU") -> None:
        self.lacks, self.query_s, self.kind = lacks, query_s, kind
        self.busy_s, self.closed = 0.0, False
        self._began = perf_counter()

    def run(self, seconds: float = 1e-3) -> None:
        began = perf_counter()
        sleep(seconds)
        self.busy_s += perf_counter() - began

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ANSWERS:
            raise AttributeError(name)
        answer = ANSWERS[name]

        def ask(*about: Any) -> Any:
            self._ask(name, *about[:1])
            return answer[about[1]] if isinstance(answer, dict) else answer

        return ask

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

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        self._ask("nvmlDeviceGetMigMode", handle)
        return [int(self.kind == "MIG"), 1]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        elapsed_s = perf_counter() - self._began
        return int(1e3 * (IDLE_W * elapsed_s + (BUSY_W - IDLE_W) * self.busy_s))

    def _ask(self, name: str, handle: str = "GPU") -> None:
        sleep(self.query_s)
        # an instance of a shared GPU has no counters
        if name in self.lacks or handle.startswith("MIG"):
            raise NVMLError("not supported")


def properties_of(device: str) -> SimpleNamespace:
    return SimpleNamespace(uuid=UUID)
