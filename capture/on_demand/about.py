"""What a process that can be asked tells of itself."""

from __future__ import annotations

import os
import platform
import socket
import sys
from typing import Any

from opgrip.capture.program.processes import rank


def describe() -> dict[str, Any]:
    """The process, the job that it is a rank of, and where its program is."""
    torch = sys.modules.get("torch")
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "host": socket.gethostname(),
        "command": " ".join(sys.orig_argv)[:1000],
        "python": platform.python_version(),
        "torch": None if torch is None else str(torch.__version__),
        "rank": rank(),
        "world_size": _world_size(),
        "job": job(),
        "position": _position(),
    }


def job() -> str | None:
    """What tells a launcher's job from others: all its ranks have it alike; None outside of one."""
    if rank() is None:
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    return " ".join(os.environ.get(name, "") for name in names)


def _world_size() -> int | None:
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and rank() is not None else None


def _position() -> int | None:
    # what tells it is loaded with the first recording
    if "opgrip.capture.on_demand.session" not in sys.modules and rank() is None:
        return None
    from opgrip.capture.on_demand.session import position

    return position()
