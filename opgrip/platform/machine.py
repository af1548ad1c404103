"""The machine: its facts, its devices, and what was measured on it once."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.cli.output_files import whole_file
from opgrip.errors import UserError, cause_of

if TYPE_CHECKING:
    import torch


CGROUP = Path("/sys/fs/cgroup")
USUAL_CACHE = 32 << 20
"""Of a machine that does not say."""
LARGEST_PAGE = 1 << 30
SHARE_OF_FREE = 0.9
"""Of the memory that is free, for cases."""


def page_size(header: Mapping[str, Any]) -> int | None:
    """Bytes of a page where a trace was captured; None where its header tells of none that there can be."""
    page = header.get("page_size")
    return page if type(page) is int and 0 < page <= LARGEST_PAGE else None


def cache_folder() -> Path:
    """Where what compilers made and what was measured is kept: `$OPGRIP_CACHE`, or `opgrip` in the user's caches."""
    folder = os.environ.get("OPGRIP_CACHE")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "opgrip"


def processor(device: str) -> list[str]:
    """What compiled code depends on: the processor's name and instructions, or the GPU's name."""
    import torch

    module = _module_of(device)
    if module is not None:
        return [str(getattr(module, "get_device_name", str)(device))]
    names = (line.split(":", 1)[1].strip() for line in lines("/proc/cpuinfo") if line.startswith("model name"))
    return [platform.machine(), next(names, ""), torch.backends.cpu.get_cpu_capability()]


def last_cache_bytes(device: str) -> int:
    """Size of the last cache that a core or a device shares; 32 MB where the system does not say."""
    module = _module_of(device)
    if module is not None:
        properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
        sizes = (int(getattr(properties, name, 0)) for name in ("L2_cache_size", "last_level_cache_size"))
        return max(sizes) or USUAL_CACHE
    # per instance, where sysconf gives the sum of all
    for index in (3, 2):
        text = "".join(lines(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size"))
        if text.endswith("K") and text[:-1].isdigit():
            return int(text[:-1]) << 10
    names = [name for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE") if name in os.sysconf_names]
    return next((size for size in map(os.sysconf, names) if size > 0), USUAL_CACHE)


def available_memory(device: str) -> int | None:
    """Bytes that cases may have on a device; None where the system does not say."""
    free = free_memory(device)
    return None if free is None else int(SHARE_OF_FREE * free)


def free_memory(device: str) -> int | None:
    """Bytes that are free on a device; None where the system does not say."""
    module = _module_of(device)
    if module is not None:
        return int(module.mem_get_info(device)[0]) if hasattr(module, "mem_get_info") else None
    return min((value for value in (_meminfo(), _cgroup()) if value is not None), default=None)


def _module_of(device: str) -> Any:
    """The part of torch that knows an accelerator; None for the CPU."""
    import torch

    kind = torch.device(device).type
    return None if kind in ("cpu", "meta") else getattr(torch, kind)


def _meminfo() -> int | None:
    for line in lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _cgroup() -> int | None:
    """What a container may still take.

    What it uses counts pages of files that were read, which go when memory is short: those not in use are taken off.
    """
    most, used, stat = (lines(str(CGROUP / f"memory.{name}")) for name in ("max", "current", "stat"))
    if not most or not used or not most[0].isdigit():
        return None
    idle = next((int(line.split()[1]) for line in stat if line.startswith("inactive_file ")), 0)
    return max(0, int(most[0]) - max(0, int(used[0]) - idle))


def lines(path: str) -> list[str]:
    """Of a file that the system has; none where it has not."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def parse_device(name: str) -> torch.device:
    """The device of that name, whether it is here or not.

    Raises
    ------
    UserError : where torch does not know it
    """
    import torch

    unknown = UserError(f"{name!r} is no device that torch knows", "name one such as cpu, cuda or cuda:1")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown from error
    # torch keeps eight bits of an index: of cuda:256 it makes cuda:0
    if name.partition(":")[2] not in ("", str(device.index)):
        raise unknown
    return device


def check_device(name: str) -> torch.device:
    """The device of that name.

    Raises
    ------
    UserError : where torch does not know it or this machine lacks it
    """
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
    """Numbers as measured now, or at an earlier time with this processor, number of threads and version of torch.

    They are kept in `measured.json`, in the user's folder for caches.
    """
    import torch

    key = [what, device, *processor(device), f"{torch.get_num_threads()} threads", f"torch {torch.__version__}"]
    path, name = cache_folder() / "measured.json", ", ".join(key)
    numbers_by_name = _read_cache(path)
    if name not in numbers_by_name:
        numbers_by_name[name] = list(measure())
        # where the folder cannot be written, they are measured again the next time
        with suppress(OSError, UserError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path, force=True) as file:
                file.write(json.dumps(numbers_by_name, indent=1).encode())
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
