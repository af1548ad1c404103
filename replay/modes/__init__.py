"""Ways to run a call. A mode is a file here, or an entry point `opgrip.modes` of another package."""

from opgrip.replay.modes.mode import (
    EAGER,
    Mode,
    ModeOptions,
    Program,
    Results,
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
    "Results",
    "Task",
    "Tuning",
    "find_mode",
    "mode",
    "modes",
    "runs_graphs",
]
