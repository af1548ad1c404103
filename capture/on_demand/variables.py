"""What the variables of a program's environment say of its recordings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opgrip.capture.on_demand.names import check_pattern, program_name
from opgrip.capture.on_demand.settings import Settings
from opgrip.capture.on_demand.trigger import signal_of
from opgrip.cli.command import not_negative, positive
from opgrip.cli.option_types import byte_count, interval
from opgrip.errors import UserError


def _signal(name: str) -> str:
    signal_of(name)
    return name


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 1 nor 0")
    return text == "1"


VARIABLES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "OPGRIP_STEPS": ("steps", positive, "steps of a recording"),
    "OPGRIP_SECONDS": ("seconds", interval, "the same as a time"),
    "OPGRIP_WARMUP": ("warmup", not_negative, "steps before those, in which the capture learns"),
    "OPGRIP_STEP_MODULE": ("step_module", str, "the class of the modules whose calls are steps"),
    "OPGRIP_SIGNAL": ("signal", _signal, "a signal that asks for a recording"),
    "OPGRIP_EVERY": ("every_s", interval, "record by itself, so often"),
    "OPGRIP_NEW_ONLY": ("new_only", _switch, "of those, keep what has something new: 1 or 0"),
    "OPGRIP_PRIVATE": ("private", _switch, "write no names, paths, texts and values of the program: 1 or 0"),
    "OPGRIP_MAX_DISK": ("max_disk_bytes", byte_count, "what such recordings take at most"),
}
"""By variable: the field of `Settings`, or an option of `Capture`; what makes it of the text, and what it is."""


def settings_of(environment: Mapping[str, str]) -> Settings:
    """The settings that variables make; `UserError` for one that is not what it is to be."""
    pattern = environment["OPGRIP_CAPTURE"]
    check_pattern(pattern)
    values: dict[str, Any] = {}
    for variable, (field, parse, _) in VARIABLES.items():
        text = environment.get(variable)
        if not text:
            continue
        try:
            values[field] = parse(text)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{variable}: {error}") from error
    options = {"private": True} if values.pop("private", False) else {}
    if options and values.get("new_only"):
        raise UserError("OPGRIP_NEW_ONLY with OPGRIP_PRIVATE needs names that stay alike", "use opcapture --salt-file")
    if "every_s" not in values:
        alone = next((name for name in ("OPGRIP_NEW_ONLY", "OPGRIP_MAX_DISK") if values.get(VARIABLES[name][0])), None)
        if alone is not None:
            raise UserError(f"{alone} without OPGRIP_EVERY", "recordings that are asked for stay")
    if "seconds" in values:
        values.setdefault("steps", None)
    return Settings(program_name(), str(Path(pattern).absolute()), options=options, **values)
