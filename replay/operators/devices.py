"""The device of a replay: its index, streams, events and memory, and the errors after which it cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from opgrip.cli.command import own_python
from opgrip.errors import UserError
from opgrip.platform.machine import available_memory, check_device, find_gpu, parse_device
from opgrip.replay.operators.lookup import Unsupported
from opgrip.traces.table.accelerators import describe_accelerators

# minimum number of cycles per microsecond of delay, because a device may be slow when it is measured
FEWEST_CYCLES_PER_US = 2_000
# number of cycles of a kernel, and number of kernels, from whose times the cycles per microsecond are determined
CALIBRATION_CYCLES, CALIBRATIONS = 200_000, 5

GRAPHS = ("CUDAGraph", "XPUGraph", "Graph")  # names of the graph class in the modules of accelerators


class DeviceLostError(BaseException):
    """Raised if a kernel failed so that this process can no longer use the device."""


def is_accelerator(device: str) -> bool:
    return torch.device(device).type not in ("cpu", "meta")


def module_of(device: str) -> Any:
    return getattr(torch, torch.device(device).type)


def graph_class(device: str) -> Any:
    """Return the class that captures work as a graph, such as `torch.cuda.CUDAGraph`; None if torch has none."""
    module = module_of(device)
    return next((getattr(module, name) for name in GRAPHS if hasattr(module, name)), None)


def with_index(device: str) -> str:
    return device if ":" in device or device in ("cpu", "meta") else f"{device}:0"


def use_device(device: str) -> None:
    if is_accelerator(device):
        module_of(device).set_device(device)


def check_present(device: str) -> None:
    """Raise `UserError` if torch does not know a device or this machine lacks it."""
    place = parse_device(device)
    try:
        if place.type not in ("cpu", "meta") and module_of(device).device_count() > (place.index or 0):
            return
    except (RuntimeError, AttributeError):
        pass
    check_device(device.removesuffix(":0"))


def name_of(device: str) -> str:
    if not is_accelerator(device) or not hasattr(module_of(device), "get_device_name"):
        return device
    return str(module_of(device).get_device_name(device))


def facts_of(device: str) -> dict[str, Any]:
    return {"accelerator": describe_accelerators([with_index(device)])} if is_accelerator(device) else {}


def synchronizer(device: str) -> Callable[[], None]:
    if not is_accelerator(device):
        return lambda: None
    module = module_of(device)
    return lambda: module.synchronize(device)


def check_use(device: str, error: BaseException) -> None:
    if not is_accelerator(device) or isinstance(error, Unsupported | MemoryError | torch.OutOfMemoryError):
        return
    try:
        synchronizer(device)()
    except Exception as lost:
        raise DeviceLostError(str(error) or str(lost)) from lost


def make_event(device: str) -> Any:
    return torch.Event(device=torch.device(device), enable_timing=True)


def current_stream(device: str) -> Any:
    return module_of(device).current_stream(device)


def delay(device: str, duration_us: float) -> None:
    """Keep a device's current stream busy for `duration_us`, if torch has a kernel for that."""
    sleep = getattr(module_of(device), "_sleep", None)
    if sleep is not None:
        sleep(round(duration_us * _cycles_per_us(device)))


@cache
def _cycles_per_us(device: str) -> float:
    stream, marks = current_stream(device), [make_event(device) for _ in range(CALIBRATIONS + 1)]
    # the first kernel also loads the module
    module_of(device)._sleep(CALIBRATION_CYCLES)
    for mark in marks[:-1]:
        mark.record(stream)
        module_of(device)._sleep(CALIBRATION_CYCLES)
    marks[-1].record(stream)
    marks[-1].synchronize()
    fastest_ms = min(one.elapsed_time(other) for one, other in pairwise(marks))
    return max(float(FEWEST_CYCLES_PER_US), CALIBRATION_CYCLES / max(float(fastest_ms) * 1e3, 1.0))


def limit_device_memory(device: str, limit: int | None) -> int | None:
    limit = limit or available_memory(device)
    module = module_of(device)
    if limit is not None and hasattr(module, "set_per_process_memory_fraction"):
        total = module.get_device_properties(device).total_memory
        module.set_per_process_memory_fraction(min(1.0, limit / total), device)
    return limit


def free_by_driver(device: str) -> int | None:
    """Return an accelerator's free memory in bytes from NVML, which needs no CUDA context; None if unknown."""
    gpu = find_gpu(device)
    if gpu is None:
        return None
    try:
        return gpu.free_bytes()
    finally:
        gpu.close()


@contextmanager
def without_waiting(device: str) -> Iterator[None]:
    """Make operators in the `with` block raise an error if torch detects that they wait for the device."""
    module = module_of(device)
    if not hasattr(module, "set_sync_debug_mode"):
        yield
        return
    before = module.get_sync_debug_mode()
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode(before)


# minimum ratio of the memory sizes of two devices that count as equal, because the driver reserves a part that varies
ALIKE = 0.98


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Properties of a device that affect the time of a call.

    capability : compute capability of a GPU, such as 9.0
    """

    name: str
    memory_bytes: int
    capability: str = ""

    def is_like(self, other: DeviceTraits) -> bool:
        low, high = sorted((self.memory_bytes, other.memory_bytes))
        return (self.name, self.capability) == (other.name, other.capability) and low >= ALIKE * high

    def __str__(self) -> str:
        capability = f", capability {self.capability}" if self.capability else ""
        return f"{self.name} ({self.memory_bytes / 1e9:.1f} GB{capability})"


def check_equal(devices: Sequence[str]) -> None:
    """Raise `UserError` if several devices are named, but they are not different accelerators of one kind."""
    first, *others = devices
    if not others:
        return
    if len({*devices}) < len(devices) or not all(map(is_accelerator, devices)):
        raise UserError(
            f"several devices must be different accelerators, got {', '.join(devices)}",
            "name each accelerator once with --device",
        )
    traits = _traits_of_all(devices)
    for device in others:
        if not traits[first].is_like(traits[device]):
            problem = f"{first} is {traits[first]}, and {device} is {traits[device]}"
            raise UserError(problem, "name devices of one kind with --device")


def _traits_of_all(devices: Sequence[str]) -> Mapping[str, DeviceTraits]:
    if all(module_of(device).is_initialized() for device in devices):
        return {device: _traits_of(device) for device in devices}
    done = subprocess.run(
        own_python(__spec__.name, *devices), capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise UserError(f"{', '.join(devices)} cannot be queried: {words[-1]}", "name one device with --device")
    records: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return {device: DeviceTraits(**record) for device, record in records.items()}


def _traits_of(device: str) -> DeviceTraits:
    module = module_of(device)
    properties = module.get_device_properties(device)
    capability = module.get_device_capability(device) if device.startswith("cuda:") else ()
    return DeviceTraits(properties.name, properties.total_memory, ".".join(map(str, capability)))


def main(*devices: str) -> None:
    print(json.dumps({device: asdict(_traits_of(device)) for device in devices}))


if __name__ == "__main__":
    main(*sys.argv[1:])
