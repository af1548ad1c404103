"""Start of a process's agent, with given settings or because of a start-up file in the Python environment."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from opgrip.capture.program.patches import LateModules

if TYPE_CHECKING:
    from opgrip.capture.on_demand.agent import Agent
    from opgrip.capture.on_demand.settings import AgentSettings

FILE = "opgrip_autostart.pth"
VARIABLE = "OPGRIP_CAPTURE"
# line that Python runs when it starts; it imports nothing unless the variable is set (`os` is already loaded then)
LINE = (
    f'import os; "{VARIABLE}" in os.environ and '
    "exec('try:\\n from opgrip.capture.on_demand.autostart import begin\\n begin()\\nexcept ImportError:\\n pass')\n"
)


def startup_file() -> Path:
    """Return the path of the `.pth` file that starts agents in this Python."""
    return Path(sysconfig.get_path("purelib")) / FILE


_has_begun = False


def begin() -> None:
    """Start the agent as soon as the program has loaded torch, if `OPGRIP_CAPTURE` is set."""
    global _has_begun
    # Python reads the file twice if an environment has two names for one folder
    if _has_begun or not os.environ.get(VARIABLE):
        return
    _has_begun = True
    if "torch" in sys.modules:
        _start()
        return
    finder = LateModules("torch".__eq__, lambda torch: _start_after(finder))
    finder.__enter__()


def _start_after(finder: LateModules) -> None:
    finder.__exit__()
    _start()


def _start() -> None:
    try:
        from opgrip.capture.on_demand.settings import settings_of

        settings = settings_of(os.environ)
        agent = start(settings)
        load_recording()
        if settings.at_start:
            from opgrip.capture.on_demand.agent import record_at_start

            record_at_start(agent)
    except Exception as error:
        print(
            f"opgrip: this process does not accept requests to record: {' '.join(str(error).split())}", file=sys.stderr
        )


def start(settings: AgentSettings) -> Agent:
    from opgrip.capture.on_demand.agent import start_agent
    from opgrip.errors import UserError

    agent = start_agent(settings)
    if settings.signal is not None:
        from opgrip.capture.on_demand.agent import listen_to
        from opgrip.capture.on_demand.settings import signal_of

        try:
            listen_to(signal_of(settings.signal))
        except UserError as error:
            print(f"opgrip: {error}", file=sys.stderr)
    return agent


def load_recording(torch: ModuleType | None = None) -> None:
    """Import the modules that recordings need, so that clients do not have to wait for them."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return
    try:
        from opgrip.capture.on_demand import session

        session.load()
    except Exception as error:
        # a recording will report the error again
        print(f"opgrip: a recording cannot be prepared: {' '.join(str(error).split())}", file=sys.stderr)
