"""The agent of a program whose command line is not ours: a start-up file of this environment, and variables.

`opgrip autostart on` puts the file there; it does nothing while `OPGRIP_CAPTURE` is not set.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from opgrip.capture.program.patches import LateModules

FILE = "opgrip_autostart.pth"
VARIABLE = "OPGRIP_CAPTURE"
LINE = (
    f'import os; "{VARIABLE}" in os.environ and '
    "exec('try:\\n from opgrip.capture.on_demand.autostart import begin\\n begin()\\nexcept ImportError:\\n pass')\n"
)
"""What Python runs when it starts. It imports nothing where the variable is not set: `os` is there already."""


def startup_file() -> Path:
    """Where the start-up file of this environment is, or would be."""
    return Path(sysconfig.get_path("purelib")) / FILE


_has_begun = False


def begin() -> None:
    """Start the agent once the program has loaded torch; a program that does not is left alone. Never raises."""
    global _has_begun
    # Python comes by the file twice where an environment has two names for one folder
    if _has_begun or not os.environ.get(VARIABLE):
        return
    _has_begun = True
    if "torch" in sys.modules:
        _start()
        return
    finder = LateModules("torch".__eq__, lambda torch: _loaded(torch, finder))
    finder.__enter__()


def _loaded(torch: ModuleType, finder: LateModules) -> None:
    if finder in sys.meta_path:
        finder.__exit__()
    _start()


def _start() -> None:
    try:
        from opgrip.capture.on_demand.starting import start
        from opgrip.capture.on_demand.variables import settings_of

        start(settings_of(os.environ))
        load_recording()
    except Exception as error:
        print(f"opgrip: this process cannot be asked to record: {' '.join(str(error).split())}", file=sys.stderr)


def load_recording(torch: ModuleType | None = None) -> None:
    """Load what a recording needs, in the thread that has loaded torch, rather than when somebody waits for it.

    Not in processes that multiprocessing has started, such as those that load data: few of them are ever asked.
    """
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return
    try:
        from opgrip.capture.on_demand import session

        session.load()
    except Exception as error:
        # a recording that is asked for will say it
        print(f"opgrip: a recording cannot be prepared: {' '.join(str(error).split())}", file=sys.stderr)
