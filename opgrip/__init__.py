"""Record what a PyTorch model really runs, and run every recorded call again anywhere."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from opgrip.cli.plugins import lazy_names

if TYPE_CHECKING:
    from opgrip.capture import Capture as Capture
    from opgrip.capture import Schedule as Schedule
    from opgrip.replay import benchmark as benchmark
    from opgrip.replay import compare as compare
    from opgrip.replay import judge as judge
    from opgrip.tools.sample_gripper import grip as grip
    from opgrip.traces import UserError as UserError
    from opgrip.traces import load as load

    __version__: str

__all__ = ["Capture", "Schedule", "UserError", "__version__", "benchmark", "compare", "grip", "judge", "load"]

_get, __dir__ = lazy_names(
    __name__,
    {
        "Capture": "opgrip.capture",
        "Schedule": "opgrip.capture",
        "UserError": "opgrip.errors",
        "benchmark": "opgrip.replay",
        "compare": "opgrip.replay",
        "grip": "opgrip.tools.sample_gripper",
        "judge": "opgrip.replay",
        "load": "opgrip.traces",
        **{package: f"opgrip.{package}" for package in ("capture", "replay", "samples", "tools", "traces")},
    },
)


def __getattr__(name: str) -> Any:
    return metadata.version("opgrip") if name == "__version__" else _get(name)
