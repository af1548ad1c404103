"""Record what a PyTorch model really runs, and run every recorded call again anywhere."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata
from pathlib import Path
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
        **{package: f"opgrip.{package}" for package in ("capture", "replay", "samples", "tools", "traces")},
    },
)


def load(path: str | Path, **options: Any) -> Any:
    """Load a trace as `Trace`, with the options of `opgrip.traces.load`, or the results of a replay as `Results`."""
    from opgrip.errors import UserError
    from opgrip.traces import load as load_trace

    try:
        return load_trace(path, **options)
    except UserError:
        from opgrip.replay import Results

        with suppress(UserError):
            if not options:
                return Results.load(path)
        raise


def __getattr__(name: str) -> Any:
    return metadata.version("opgrip") if name == "__version__" else _get(name)
