"""Modes: ways to run a call; a mode is a file of this package, or an entry point `opgrip.modes` of another one."""

from opgrip.replay.modes.mode import (
    EAGER,
    Mode,
    ModeOptions,
    Program,
    RunOutputs,
    Task,
    Tuning,
    find_mode,
    mode,
    modes,
    runs_graphs,
)

__all__ = [
    "EAGER",
    "Mode",
    "ModeOptions",
    "Program",
    "RunOutputs",
    "Task",
    "Tuning",
    "find_mode",
    "mode",
    "modes",
    "runs_graphs",
]
