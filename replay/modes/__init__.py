"""Ways to run a call. A mode is a file here, or an entry point `opgrip.modes` of another package."""

from opgrip.replay.modes.mode import Mode, Program, Results, Task, Tuning, find_mode, mode, modes

__all__ = ["Mode", "Program", "Results", "Task", "Tuning", "find_mode", "mode", "modes"]
