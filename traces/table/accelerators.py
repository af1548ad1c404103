"""Facts about devices, libraries and settings that affect measured times, and reasons to doubt those times."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from opgrip.platform.machine import find_gpu, lines
from opgrip.platform.precisions import PLACES, allows_tf32, read_precision
from opgrip.traces.schema.arguments import leaves, tensors
from opgrip.traces.schema.records import Signature

if TYPE_CHECKING:
    import pandas as pd

CONTENDED = 0.2  # share of a capture's time with other processes on its processors above which its times are doubtful
SLOW = 0.05  # share of the calls' time spent on slow page faults above which times are doubtful
# share of device time in calls that took longer to launch than to run, above which device times by events are doubtful
LAUNCH_BOUND = 0.1


def time_doubts(contended: float, slow_memory: float) -> Iterator[str]:
    """Yield the reasons to doubt the times of a capture, each with a remedy.

    contended : share of the capture in intervals in which other processes probably slowed the program
    slow_memory : share of the calls' time that slow page faults took
    """
    if contended >= CONTENDED:
        yield (
            f"the machine was busy in {contended:.0%} of the recorded time: times and shares are doubtful; capture "
            "again when nothing else runs"
        )
    if slow_memory >= SLOW:
        yield (
            f"the machine was slow to provide memory, which took {slow_memory:.0%} of the calls' time: "
            "these calls are marked as perturbed, and an estimate is subtracted from their times; capture again, or "
            "with more warm-up steps, for better times"
        )


def doubt_of_events(calls: pd.DataFrame) -> str | None:
    device_ns = calls["device_ns"].fillna(0) * calls["count"]
    share = float(device_ns[calls["device_ns"] <= calls["duration_ns"]].sum()) / max(float(device_ns.sum()), 1.0)
    if share < LAUNCH_BOUND:
        return None
    return (
        f"device times were measured by events, and {share:.0%} of them belongs to calls that took longer to launch "
        "than to run, so it includes host time; capture with --device-time kernels if the device records its kernels"
    )


Facts = dict[str, Any]  # facts by name: numbers, booleans, strings, lists of strings, or nested facts

# system files that contain the version of a driver
DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")

# names of a device's properties, by kind of device
PROPERTIES = {
    "name": ("name",),
    "architecture": ("gcnArchName",),
    "memory_bytes": ("total_memory",),
    "l2_bytes": ("L2_cache_size", "last_level_cache_size"),
    "multiprocessors": ("multi_processor_count", "max_compute_units"),
    "driver": ("driver_version",),
}

# functions of `torch.backends.cuda` that report whether an implementation of attention is enabled, by name
ATTENTION = {
    "flash": "flash_sdp_enabled",
    "efficient": "mem_efficient_sdp_enabled",
    "cudnn": "cudnn_sdp_enabled",
    "math": "math_sdp_enabled",
}

# places below `torch.backends` of settings that are recorded, by name
BACKENDS = {
    "allow_fp16_reduced_precision_reduction": "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction": "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation": "cuda.matmul.allow_fp16_accumulation",
    "cudnn_benchmark_limit": "cudnn.benchmark_limit",
    "cufft_plans": "cuda.cufft_plan_cache.max_size",
    "cutedsl_kernels": "python_native.cutedsl.enabled",
    "triton_kernels": "python_native.triton.enabled",
}

UNITS = {"w": "W", "mhz": "MHz"}  # unit of a fact, by the suffix of its name

# environment variables that control the allocator and the libraries' arithmetic
VARIABLES = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE"),
)

# environment variables that decide which kernels run on a CPU, how their threads are placed, and what they keep
HOST_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"),
    *("KMP_AFFINITY", "KMP_BLOCKTIME", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY"),
    *("LRU_CACHE_CAPACITY", "THP_MEM_ALLOC_ENABLE"),
)


def environment_doubts(recorded: object) -> Iterator[str]:
    """Yield how the environment of a program, by its trace's header, differs from that of this process."""
    for name in HOST_VARIABLES if isinstance(recorded, dict) else ():
        there, here = _items(recorded).get(name, "unset"), os.environ.get(name, "unset")
        if there != here:
            yield f"times may differ: the environment variable {name} was {there} in the program and is {here} here"


HOST = ("cpu", "meta")  # device types that do not count as accelerators


def device_of(signature: Signature) -> str:
    devices = [spec.device for spec in tensors([signature.args, signature.kwargs, signature.outputs])]
    devices = devices or [
        str(leaf) for leaf in leaves([signature.args, signature.kwargs]) if type(leaf) is torch.device
    ]
    return next((device for device in devices if device not in HOST), devices[0] if devices else "cpu")


def describe_accelerators(devices: Sequence[str]) -> Facts:
    if not devices:
        return {}
    kinds = {torch.device(device).type for device in devices}
    versions: dict[str, str] = {}
    facts_by_device: dict[str, Facts] = {}
    # NVML is released only after the last device, because it takes long to start again
    with ExitStack() as stack:
        for device in devices:
            facts_by_device[device] = _properties(device)
            gpu = _result_or_none(partial(find_gpu, device))
            if gpu is not None:
                stack.callback(_result_or_none, gpu.close)
                facts_by_device[device] |= _result_or_none(gpu.limits) or {}
                versions |= _result_or_none(gpu.versions) or {}
    parts = {"devices": facts_by_device, "libraries": versions | _libraries(kinds), "settings": _settings(kinds)}
    return {name: facts for name, facts in parts.items() if facts}


def merge_facts(first: Mapping[str, Any], second: Mapping[str, Any]) -> Facts:
    merged = dict(first)
    for name, value in second.items():
        before = merged.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            merged[name] = merge_facts(before, value)
        else:
            merged[name] = value
    return merged


def facts_in_words(accelerator: object) -> Iterator[tuple[str, str]]:
    devices_of_text: dict[str, list[str]] = {}
    for device, facts in _items(_items(accelerator).get("devices")).items():
        text = _list_facts({name: value for name, value in _items(facts).items() if name != "name"})
        devices_of_text.setdefault(text, []).append(device)
    for text, devices in devices_of_text.items():
        yield "hardware", f"{', '.join(devices)}: {text}"
    for part in ("libraries", "settings"):
        if facts := _items(_items(accelerator).get(part)):
            yield part, _list_facts(facts)


def _items(facts: object) -> Facts:
    return facts if isinstance(facts, dict) else {}


def _list_facts(facts: Facts) -> str:
    return ", ".join(_in_words(name, value) for name, value in facts.items())


def _in_words(name: str, value: object) -> str:
    words = name.replace("_", " ") if name.islower() else name
    match value:
        case bool():
            return words if value else f"no {words}"
        case list():
            return f"{words} {'/'.join(map(str, value)) or 'none'}"
        case dict():
            return f"{words} {' '.join(f'{key}:{item}' for key, item in value.items())}"
    quantity, _, unit = words.rpartition(" ")
    if unit == "bytes" and isinstance(value, int):
        return f"{quantity} {f'{value / 2**30:,.1f} GiB' if value >= 1 << 30 else f'{value >> 20:,} MiB'}"
    if unit in UNITS and isinstance(value, int | float):
        return f"{quantity} {value:,.0f} {UNITS[unit]}"
    return f"{words} {value}"


def _properties(device: str) -> Facts:
    module = getattr(torch, torch.device(device).type)
    properties = _result_or_none(lambda: module.get_device_properties(device))
    facts: Facts = {}
    for name, attributes in PROPERTIES.items():
        value = next((value for item in attributes if (value := getattr(properties, item, None)) is not None), None)
        # in CUDA builds of torch, the attribute of the architecture holds the device's name
        if isinstance(value, str | int) and not (name == "architecture" and torch.version.hip is None):
            facts[name] = value
    capability = _result_or_none(lambda: module.get_device_capability(device))
    # some accelerators return a dictionary of their capabilities
    if isinstance(capability, tuple):
        facts["capability"] = ".".join(map(str, capability))
    return facts


def _libraries(kinds: Collection[str]) -> dict[str, str]:
    readers: dict[str, Callable[[], Any]] = {
        "driver": _driver,
        "cuda": lambda: torch.version.cuda,
        "hip": lambda: torch.version.hip,
        "xpu": lambda: torch.version.xpu,
    }
    if "cuda" in kinds:
        readers |= {"cudnn": _cudnn_version, "nccl": lambda: ".".join(map(str, torch.cuda.nccl.version()))}
    return {name: value for name, read in readers.items() if isinstance(value := _result_or_none(read), str)}


def _driver() -> str | None:
    for path in DRIVERS:
        match = re.search(r"\d+\.\d+(\.\d+)*", " ".join(lines(path)[:1]))
        if match is not None:
            return match[0]
    return None


def _cudnn_version() -> str | None:
    number = torch.backends.cudnn.version()
    if number is None or torch.version.hip is not None:
        return None if number is None else str(number)
    # 8907 is 8.9.7, and 91002 is 9.10.2
    major = 10_000 if number >= 90_000 else 1_000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def _settings(kinds: Collection[str]) -> Facts:
    settings = {name: _result_or_none(partial(attrgetter(place), torch.backends)) for name, place in BACKENDS.items()}
    facts: Facts = {
        "attention": [
            name for name, asks in ATTENTION.items() if _result_or_none(getattr(torch.backends.cuda, asks, None))
        ],
        **{name: value for name, value in settings.items() if isinstance(value, int)},
        "fp32_precision": dict(_precisions()),
    }
    allocator = _result_or_none(torch.cuda.get_allocator_backend) if "cuda" in kinds else None
    if isinstance(allocator, str):
        facts["allocator"] = allocator
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return facts | ({"environment": environment} if environment else {})


def _precisions() -> Iterator[tuple[str, str]]:
    # before torch 2.9, `tf32` if it is allowed, else `ieee`
    for place in PLACES:
        if not place.startswith("mkldnn"):
            yield place, read_precision(place) or ("tf32" if allows_tf32(place) else "ieee")


def _result_or_none(read: Callable[[], Any] | None) -> Any:
    with suppress(Exception):
        return None if read is None else read()
    return None
