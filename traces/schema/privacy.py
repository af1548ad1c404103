"""Privacy of the fields of a trace: how each field is treated when the trace is redacted.

A field of a record or of an argument declares its privacy in its type: `module: Annotated[str, hashed("module")]`;
fields of dictionaries are declared in the tables below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

from opgrip.platform.precisions import CUDA_FLAGS, HOST_FLAGS

T = TypeVar("T")
# fields of a dictionary by name: each a `Privacy`, a nested table, or a list with the table of each item
Table: TypeAlias = Mapping[str, Any]
DEVICE_KEY = "*device"  # key in a table that represents all keys that are names of devices


@dataclass(frozen=True, slots=True)
class Privacy:
    """Rule by which a redaction treats a field.

    treatment : `public` fields are kept if they contain known words of this `kind`, or anything if `kind` is empty;
        names in `hashed` fields are hashed unless torch or Python define them; `replaced` numbers become a default;
        `nested` fields are redacted recursively; `dropped` fields are left out
    table : for a dictionary, the rules of its entries
    """

    treatment: str
    kind: str = ""
    table: Table | None = None


PUBLIC = Privacy("public")
NESTED = Privacy("nested")
# declaration of a dictionary of attributes, whose names are hashed like function names
ATTRIBUTES = Privacy("nested", "attributes")
DROPPED = Privacy("dropped")
Public: TypeAlias = Annotated[T, PUBLIC]


def public(kind: str) -> Privacy:
    return Privacy("public", kind)


def hashed(kind: str) -> Privacy:
    return Privacy("hashed", kind)


def table(fields: Table) -> Privacy:
    return Privacy("nested", table=fields)


def replaced(kind: str) -> Privacy:
    return Privacy("replaced", kind)


@cache
def privacy_of(cls: type[Any]) -> Mapping[str, Privacy | None]:
    privacy: dict[str, Privacy | None] = dict.fromkeys(item.name for item in fields(cls))
    for name, hint in get_type_hints(cls, include_extras=True).items():
        for item in getattr(hint, "__metadata__", ()):
            if name in privacy and isinstance(item, Privacy):
                privacy[name] = item
    return privacy


COUNT, FLAG, DEVICE, HARDWARE = public("count"), public("flag"), public("device"), public("hardware")
SETTING, VERSION = public("setting"), public("version")

DEVICE_NAMES: Table = {DEVICE_KEY: HARDWARE}
ACCELERATOR: Table = {
    "devices": {
        DEVICE_KEY: dict.fromkeys(
            ("name", "capability", "architecture", "driver", "memory_bytes", "l2_bytes", "multiprocessors")
            + ("power_limit_w", "max_sm_mhz", "max_memory_mhz", "ecc", "mig"),
            HARDWARE,
        )
    },
    "libraries": dict.fromkeys(("driver", "driver_cuda", "cuda", "hip", "xpu", "cudnn", "nccl"), VERSION),
    "settings": dict.fromkeys(
        ("attention", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
        + ("allow_fp16_accumulation", "fp32_precision", "allocator"),
        SETTING,
    )
    | {"environment": DROPPED},
}
CONTEXT_SETTINGS: Table = dict.fromkeys(
    ("grad", "inference", "deterministic", "deterministic_warn_only", "matmul_precision", "fp32_precision", "threads")
    + ("default_dtype", "autocast", "stream", "flush_denormal", *HOST_FLAGS, *CUDA_FLAGS),
    SETTING,
)
THINNED_COUNTS: Table = dict.fromkeys(("values", "scopes", "steps"), COUNT)
HEADER_FIELDS: Table = {
    # added by the writer
    **dict.fromkeys(("type", "format", "version"), DROPPED),
    **dict.fromkeys(("opgrip", "torch", "python"), VERSION),
    "platform": public("platform"),
    "device": DEVICE,
    "devices": DEVICE_NAMES,
    "accelerator": ACCELERATOR,
    **dict.fromkeys(("page_size", "threads", "warmup", "steps", "rank", "world_size"), COUNT),
    "timed": FLAG,
    "converted_from": public("format"),
    "model": {"name": hashed("model"), "class": hashed("model"), "run": public("run"), "autocast": SETTING},
    # merging the ranks of a program requires the offsets between their starts
    "started_unix_ns": replaced("start"),
    "processes": NESTED,
    "clocks": {
        "by": hashed("clocks"),
        "processes": [dict.fromkeys(("offset_ns", "measured_ns", "spread_ns", "collectives"), public("integer"))],
    },
    "flight": {"last": COUNT, "before": COUNT, "reason": hashed("stop reason")},
    "on_demand": {"recording": public("number")},
    **dict.fromkeys(
        ("environment", "time", "command", "pid", "seed", "parent_pid", "values_file", "distilled"), DROPPED
    ),
}
