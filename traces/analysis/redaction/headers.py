"""What becomes of each field of the format, and a trace's header without what identifies its owner.

A field that stands nowhere here does not go out: each record is made anew of the fields that `redaction.py` names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from signal import Signals
from typing import Any

from opgrip.traces.analysis.redaction.names import DEVICE, RUNS, Names, is_public_text, public_version
from opgrip.traces.analysis.redaction.policy import MODEL, Policy
from opgrip.traces.codec.json_values import LATEST_NS
from opgrip.traces.io.foreign_files import formats

TREATMENTS: dict[str, str] = {
    # numbers that records refer to each other by, counts, times since the start, shapes and flags
    "stays": """
        header.page_size header.threads header.warmup header.steps header.rank header.world_size
        header.clocks header.clocks.processes header.clocks.processes.offset_ns
        header.clocks.processes.measured_ns header.clocks.processes.spread_ns
        header.clocks.processes.collectives signature.id observed.signature observed.since_ns
        observed.storage scope.id scope.context scope.forward scope.gripped thread.id thread.process
        calls.thread calls.start_ns calls.signature calls.scope calls.after_ns calls.duration_ns
        calls.tensors calls.newest calls.storages calls.device_ns calls.page_faults calls.streams
        calls.perturbed calls.slow_memory end.contended end.calls end.before end.thinned.values end.thinned.scopes
        end.thinned.steps end.step_starts_ns end.signatures end.duration_ns end.dropped.count
        end.without_values.count end.passed_by.count entered.thread entered.start_ns
        entered.scope entered.signature context.id
        effects.signature effects.operators effects.operator_ns device_times.thread device_times.first
        device_times.device_ns kernels.signature kernels.launches kernels.device_ns argument.size
        argument.group.ranks argument.group.rank argument.shared.id argument.same argument.ellipsis
        tensor.shape tensor.stride tensor.offset tensor.requires_grad tensor.storage tensor.conj tensor.neg
        tensor.pinned made_of.coo.coalesced made_of.per_channel.axis made_of.nested.sizes
        made_of.nested.strides made_of.nested.offsets values.true values.total values.others
        values.ascending values.first values.whole values.zeros values.nan values.inf values.minus_inf
        special_float.float
    """,
    # words of the format, of torch and of the system; what is in no list of these is hashed or left out
    "public words": """
        header.type header.format header.version header.opgrip header.torch header.python header.platform
        header.devices header.device header.clocks.by signature.type signature.kind observed.type scope.type
        scope.phase values.type values.model thread.type calls.type end.type end.devices end.stopped
        context.type context.settings entered.type effects.type device_times.type kernels.type
        argument.dtype argument.device argument.layout argument.memory_format argument.generator.device
        argument.opaque argument.group.backend argument.reduction argument.numpy_scalar.dtype tensor.dtype
        tensor.device tensor.layout accelerator.devices accelerator.devices.*.name
        accelerator.devices.*.capability accelerator.devices.*.architecture accelerator.devices.*.driver
        accelerator.devices.*.memory_bytes accelerator.devices.*.l2_bytes
        accelerator.devices.*.multiprocessors accelerator.devices.*.power_limit_w
        accelerator.devices.*.max_sm_mhz accelerator.devices.*.max_memory_mhz accelerator.devices.*.ecc
        accelerator.devices.*.mig accelerator.libraries accelerator.settings accelerator.settings.attention
        accelerator.settings.allow_fp16_reduced_precision_reduction
        accelerator.settings.allow_bf16_reduced_precision_reduction
        accelerator.settings.allow_fp16_accumulation accelerator.settings.fp32_precision
        accelerator.settings.allocator
    """,
    # by a secret salt: names of torch's classes, of Python's and of public operators stay
    "salted": """
        header.model signature.raised scope.module scope.module_type scope.function scope.file scope.line
        scope.callers thread.name end.dropped.reason end.without_values.reason end.passed_by.reason
        argument.group.name argument.object.class argument.module.class argument.named tensor.cls
    """,
    # those of torch stay, custom ones unless `--hide-operators` has them hashed; gripped functions' are hashed
    "operators": """
        signature.op scope.inside end.dropped.op end.without_values.op end.passed_by.op kernels.names
    """,
    "coarse": """
        argument.slice argument.range complex.complex made_of.per_tensor.scale made_of.per_tensor.zero_point
        made_of.per_channel.scales made_of.per_channel.zero_points values.data values.frequent values.low
        values.high values.mean values.std
    """,
    "moved": "header.started_unix_ns argument.generator.seed argument.bytes values.id tensor.values observed.values",
    # what stands in them is redacted in its turn
    "parts": """
        header.processes header.accelerator end.accelerator end.thinned end.dropped end.without_values end.passed_by
        signature.args signature.kwargs signature.outputs observed.outputs entered.opened effects.after
        argument.tuple argument.dict argument.generator argument.tensor argument.group argument.object
        argument.object.fields argument.object.content argument.module argument.module.parameters
        argument.module.buffers argument.module.modules argument.module.fields argument.numpy
        argument.numpy_scalar argument.numpy_scalar.value argument.shared argument.shared.value argument.set
        argument.frozenset tensor.made_of made_of.coo made_of.coo.indices made_of.coo.values
        made_of.coo.rows made_of.compressed made_of.compressed.compressed made_of.compressed.plain
        made_of.compressed.values made_of.per_tensor made_of.per_channel made_of.nested
        made_of.nested.buffer
    """,
    "left out": """
        header.time header.command header.pid header.seed header.parent_pid header.values_file
        header.distilled header.distilled.method header.distilled.keys header.distilled.traces
        header.distilled.traces.*.cases header.distilled.traces.*.us values.tensor effects.random_state
        accelerator.settings.environment
    """,
}
"""Fields of the schema by what becomes of them."""

LEFT_OUT = frozenset(TREATMENTS["left out"].split())


def treatment_of(field: str) -> str | None:
    """What becomes of a field, such as `scope.module`; None where nobody has decided."""
    return next((treatment for treatment, fields in TREATMENTS.items() if field in fields.split()), None)


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
