"""How a process that can be asked was started: what a recording is where nobody says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opgrip.capture.on_demand.names import DEFAULT

STEPS, WARMUP = 3, 1


@dataclass(frozen=True, slots=True)
class Settings:
    """What the process was started with.

    Attributes
    ----------
    name : what the process is called
    output : pattern of the recordings' names, absolute
    steps, seconds, warmup : as in `Extent`
    step_module : pattern of the modules whose calls are steps; None for what the program says, or calls of all
    signal : that asks for a recording; None for none
    every_s : record by itself, so many seconds after the last time
    new_only : of those, keep what has a signature that the service has not called before, and a day's counts of all
    max_disk_bytes : of such recordings, the oldest of which leave for new ones
    options : of `Capture`
    """

    name: str
    output: str = DEFAULT
    steps: int | None = STEPS
    seconds: float | None = None
    warmup: int = WARMUP
    step_module: str | None = None
    signal: str | None = None
    every_s: float | None = None
    max_disk_bytes: int | None = None
    new_only: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """One recording that is asked for; None where the process's settings say it.

    Attributes
    ----------
    begins_at : as in `Extent`
    wait_s : for a step to begin
    sampled : the process asks for it by itself
    options : of `Capture`, over those of the settings
    """

    output: str | None = None
    steps: int | None = None
    seconds: float | None = None
    warmup: int | None = None
    step_module: str | None = None
    begins_at: int | None = None
    wait_s: float = 60.0
    sampled: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
