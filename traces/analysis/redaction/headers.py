"""A trace's header without what tells whose it is: the fields that stay are named, all others are left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from signal import Signals
from typing import Any

from opgrip.traces.analysis.redaction.names import Names
from opgrip.traces.analysis.redaction.policy import MODEL, Policy
from opgrip.traces.analysis.redaction.public_words import DEVICE, RUNS, is_public_text, public_version
from opgrip.traces.codec.json_values import LATEST_NS
from opgrip.traces.io.foreign_files import formats

REDACTED = "redacted"
"""The header's field that says that a trace was redacted, and what was kept as it was."""
SETTING_WORDS = frozenset(
    (
        "backends",
        "cuda",
        "cudnn",
        "mkldnn",
        "matmul",
        "conv",
        "rnn",
        "all",
        "generic",
        "none",
        "default",
        "true",
        "false",
    )
    + ("cudaMallocAsync", "flash", "mem_efficient", "efficient", "math", "overrideable", "expandable_segments")
)
"""That settings of torch consist of, besides types, devices and settings of operators."""
SETTINGS = frozenset(
    ("grad", "inference", "deterministic", "deterministic_warn_only", "matmul_precision", "fp32_precision", "threads")
    + ("default_dtype", "autocast", "cudnn", "cudnn_benchmark", "cudnn_deterministic", "cudnn_tf32", "stream")
)
"""Those of a context that stay."""
HARDWARE = re.compile(r"[\w .,()@+/:-]{1,120}")
PLATFORM = re.compile(r"(Linux|Darwin|Windows)( (x86_64|AMD64|aarch64|arm64|ppc64le|s390x|riscv64)$)?")
CLOCKS = frozenset(("collectives", "starts"))


def redact_header(fields: Mapping[str, Any], policy: Policy, names: Names) -> dict[str, Any]:
    """The fields of a redacted header."""
    redacted: dict[str, Any] = {}
    for name, value in fields.items():
        redact = _FIELDS.get(name)
        image = None if redact is None else redact(value, policy, names)
        if image is not None:
            redacted[name] = image
    kept = sorted(policy.keep)
    return {**redacted, REDACTED: {"kept": kept, "operators_hidden": policy.hide_operators}}


def redact_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a context that are torch's."""
    return {name: value for name, value in settings.items() if name in SETTINGS and _is_setting(value)}


def redact_devices(devices: object) -> dict[str, str]:
    """Names of the hardware."""
    if not isinstance(devices, dict):
        return {}
    return {
        device: name
        for device, name in devices.items()
        if DEVICE.fullmatch(str(device)) and isinstance(name, str) and HARDWARE.fullmatch(name)
    }


def redact_accelerator(form: object) -> dict[str, Any]:
    """What the accelerators are, and how torch is set; variables of the environment do not stay."""
    if not isinstance(form, dict):
        return {}
    devices = {
        device: {name: value for name, value in facts.items() if name in _DEVICE_FACTS and _is_fact(value)}
        for device, facts in _dict(form.get("devices")).items()
        if DEVICE.fullmatch(device) and isinstance(facts, dict)
    }
    libraries = {
        name: public_version(str(version))
        for name, version in _dict(form.get("libraries")).items()
        if name in _LIBRARIES and public_version(str(version))
    }
    settings = {
        name: value
        for name, value in _dict(form.get("settings")).items()
        if name in _ACCELERATOR_SETTINGS and _is_nested_setting(value)
    }
    parts = {"devices": devices, "libraries": libraries, "settings": settings}
    return {name: part for name, part in parts.items() if part}


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_setting(value: object) -> bool:
    """Whether a value is a number, or words of torch's own, such as `cpu:bfloat16,cuda:float16`."""
    if not isinstance(value, str):
        return isinstance(value, bool | int | float)
    return all(word in SETTING_WORDS or is_public_text(word) for word in re.split(r"[,:=. ]", value))


def _is_nested_setting(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_setting, value))
    return all(map(_is_setting, (*value, *value.values()))) if isinstance(value, dict) else _is_setting(value)


def _is_fact(value: object) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, str) and bool(HARDWARE.fullmatch(value)))


def _model(value: Any, policy: Policy, names: Names) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    if policy.keeps(MODEL):
        texts = {name: text for name, text in value.items() if name in ("name", "class") and isinstance(text, str)}
    else:
        texts = {name: names.word(str(value[name])) for name in ("name", "class") if name in value}
    runs = {name: value[name] for name in ("run",) if value.get(name) in RUNS}
    return texts | runs | {name: value[name] for name in ("autocast",) if _is_setting(value.get(name))}


def _started(value: Any, policy: Policy, names: Names) -> int | None:
    # ranks of one program, and a merge, need how far apart they started
    return (value + names.shift_ns()) % LATEST_NS if type(value) is int else None


def _version(value: Any, policy: Policy, names: Names) -> str | None:
    return public_version(str(value)) or None


def _count(value: Any, policy: Policy, names: Names) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _device(value: Any, policy: Policy, names: Names) -> str | None:
    return value if DEVICE.fullmatch(str(value)) else None


def _platform(value: Any, policy: Policy, names: Names) -> str | None:
    match = PLATFORM.match(str(value))
    return match[0] if match else None


def _processes(value: Any, policy: Policy, names: Names) -> list[dict[str, Any]] | None:
    if not isinstance(value, list):
        return None
    headers = [redact_header(item if isinstance(item, dict) else {}, policy, names) for item in value]
    return [{name: item for name, item in header.items() if name != REDACTED} for header in headers]


def _clocks(value: Any, policy: Policy, names: Names) -> dict[str, Any] | None:
    clocks = _dict(value)
    by, processes = clocks.get("by"), clocks.get("processes")
    if not isinstance(by, str) or not isinstance(processes, list):
        return None
    fields = ("offset_ns", "measured_ns", "spread_ns", "collectives")
    numbers = [
        {name: item[name] for name in fields if name in item and type(item[name]) in (int, type(None))}
        for item in map(_dict, processes)
    ]
    return {"by": by if by in CLOCKS else names.word(by), "processes": numbers}


def _flight(value: Any, policy: Policy, names: Names) -> dict[str, Any] | None:
    flight = _dict(value)
    counts = {name: flight[name] for name in ("last", "before") if _count(flight.get(name), policy, names) is not None}
    reason = flight.get("reason")
    if not isinstance(reason, str):
        return counts
    return counts | {"reason": reason if reason in Signals.__members__ else names.error(reason)}


def _on_demand(value: Any, policy: Policy, names: Names) -> dict[str, Any]:
    # who made a recording says which ones may leave for new ones
    about = _dict(value)
    return {name: about[name] for name in ("recording", "sampled") if isinstance(about.get(name), bool | int)}


_DEVICE_FACTS = frozenset(
    ("name", "capability", "architecture", "driver", "memory_bytes", "l2_bytes", "multiprocessors", "power_limit_w")
    + ("max_sm_mhz", "max_memory_mhz", "ecc", "mig")
)
_LIBRARIES = frozenset(("driver", "driver_cuda", "cuda", "hip", "xpu", "cudnn", "nccl"))
_ACCELERATOR_SETTINGS = frozenset(
    ("attention", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    + ("allow_fp16_accumulation", "fp32_precision", "allocator")
)
_FIELDS: dict[str, Callable[[Any, Policy, Names], Any]] = {
    "opgrip": _version,
    "torch": _version,
    "python": _version,
    "platform": _platform,
    "devices": lambda value, policy, names: redact_devices(value),
    "accelerator": lambda value, policy, names: redact_accelerator(value) or None,
    "page_size": _count,
    "threads": _count,
    "model": _model,
    "warmup": _count,
    "steps": _count,
    "device": _device,
    "rank": _count,
    "timed": lambda value, policy, names: value if isinstance(value, bool) else None,
    "converted_from": lambda value, policy, names: value if value in formats.names() else None,
    "world_size": _count,
    "started_unix_ns": _started,
    "processes": _processes,
    "clocks": _clocks,
    "flight": _flight,
    "on_demand": _on_demand,
}
