"""What tells devices apart; `python -m opgrip.replay.operators.device_traits DEVICE ...` prints it, in JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opgrip.cli.own_python import own_python
from opgrip.errors import UserError
from opgrip.replay.operators.devices import is_accelerator, module_of

ALIKE = 0.98
"""Of the larger memory, where that of two devices is the same: the driver keeps some of it, not always as much."""


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What the time of a call on a device depends on.

    Attributes
    ----------
    capability : of a GPU, such as 9.0; empty where its kind has none
    """

    name: str
    memory_bytes: int
    capability: str = ""

    def is_like(self, other: DeviceTraits) -> bool:
        """Whether both run calls alike."""
        low, high = sorted((self.memory_bytes, other.memory_bytes))
        return (self.name, self.capability) == (other.name, other.capability) and low >= ALIKE * high

    def __str__(self) -> str:
        capability = f", capability {self.capability}" if self.capability else ""
        return f"{self.name} ({self.memory_bytes / 1e9:.1f} GB{capability})"


def check_equal(devices: Sequence[str]) -> None:
    """Raise `UserError` where cases cannot be spread over devices, whose times would say nothing of each other.

    Parameters
    ----------
    devices : with their index, all of them there
    """
    first, *others = devices
    if not others:
        return
    if len({*devices}) < len(devices) or not all(map(is_accelerator, devices)):
        raise UserError(
            f"cases are spread over several accelerators, not over {', '.join(devices)}", "name each once with --device"
        )
    traits = _traits_of_all(devices)
    for device in others:
        if not traits[first].is_like(traits[device]):
            problem = f"{first} is {traits[first]}, and {device} is {traits[device]}"
            raise UserError(problem, "cases are spread over equal devices: name those alone with --device")


def _traits_of_all(devices: Sequence[str]) -> Mapping[str, DeviceTraits]:
    """By their names, asked in a process that ends where this one has no context: to ask makes one on each device."""
    if all(module_of(device).is_initialized() for device in devices):
        return {device: _traits_of(device) for device in devices}
    done = subprocess.run(
        own_python(__spec__.name, *devices), capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise UserError(f"{', '.join(devices)} cannot be asked what they are: {words[-1]}", "name one with --device")
    records: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return {device: DeviceTraits(**record) for device, record in records.items()}


def _traits_of(device: str) -> DeviceTraits:
    module = module_of(device)
    properties = module.get_device_properties(device)
    capability = module.get_device_capability(device) if device.startswith("cuda:") else ()
    return DeviceTraits(properties.name, properties.total_memory, ".".join(map(str, capability)))


def main(*devices: str) -> None:
    """Print the traits of devices."""
    print(json.dumps({device: asdict(_traits_of(device)) for device in devices}))


if __name__ == "__main__":
    main(*sys.argv[1:])
