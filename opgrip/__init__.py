"""Record what a PyTorch model really runs, and run every recorded call again anywhere.

The packages are `opgrip.capture`, `opgrip.replay`, `opgrip.samples`, `opgrip.tools` and `opgrip.traces`. Public names
are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgrip.capture import Capture as Capture
    from opgrip.capture import Schedule as Schedule
    from opgrip.replay import compare as compare
    from opgrip.tools.sample_gripper import grip as grip
    from opgrip.traces import load as load

    __version__: str

__all__ = ["Capture", "Schedule", "__version__", "compare", "grip", "load"]

_MODULES = {
    "Capture": "opgrip.capture",
    "Schedule": "opgrip.capture",
    "compare": "opgrip.replay",
    "grip": "opgrip.tools.sample_gripper",
    "load": "opgrip.traces",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("opgrip")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'opgrip' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
