"""Recording of the processes that a program spawns with `multiprocessing`.

A spawned process receives the settings through the pipe that `multiprocessing` uses. It is recorded from the start of
its work, or from when it loads torch, until its end. A process whose Python cannot import opgrip runs without
recording.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from multiprocessing import process, spawn, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.capture.program.patches import LateModules, Patches
from opgrip.capture.program.processes import child_path
from opgrip.errors import one_line

if TYPE_CHECKING:
    from opgrip.capture.session.capture import Capture

_BEGIN = """
try:
    from {module} import begin
except Exception:
    # another Python, without opgrip
    pass
else:
    begin({settings!r})
"""


class SpawnWatch:
    """Sends the capture's settings to the processes that this process spawns between `start` and `stop`.

    describe : returns the settings for `begin` in a process that is being spawned, or None to leave it unrecorded
    failed : called with an error because of which a spawned process is not recorded
    """

    def __init__(self, describe: Callable[[], Mapping[str, Any] | None], failed: Callable[[Exception], None]) -> None:
        self._describe, self._failed = describe, failed
        self._patches = Patches()

    def start(self) -> None:
        self._patches.replace(spawn, "get_preparation_data", self._adding)

    def stop(self) -> None:
        self._patches.undo()

    def _adding(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def prepared(name: str) -> dict[str, Any]:
            data = original(name)
            try:
                settings = self._describe()
                if settings is not None:
                    # `prepare` ignores keys that it does not know
                    data["opgrip"] = _Beginning(pickle.dumps(dict(settings)))
            except Exception as error:
                self._failed(error)
            return data

        return prepared


class _Beginning:
    """Object in the data sent to a spawned process; when that process unpickles it, `begin` is called there."""

    def __init__(self, settings: bytes) -> None:
        self._settings = settings

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return exec, (_BEGIN.format(module=__name__, settings=self._settings),)


def begin(settings: bytes) -> None:
    """Arrange that this spawned process is recorded from the start of its work.

    settings : pickled dictionary with `root` (trace of the main process), `policy` (how records are redacted) and
        `options` (of `Capture`)
    """
    original = process.BaseProcess._bootstrap  # type: ignore[attr-defined]

    def bootstrap(self: Any, *args: Any, **kwargs: Any) -> Any:
        # processes that this one forks run it too
        process.BaseProcess._bootstrap = original  # type: ignore[attr-defined]
        # as the original does first, so that a worker of a pool is known as one
        process._current_process = self  # type: ignore[attr-defined]
        if "torch" in sys.modules:
            _record(settings)
        else:
            late = LateModules("torch".__eq__, lambda torch: _record(settings, late))
            late.__enter__()
        return original(self, *args, **kwargs)

    process.BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]


def _record(settings: bytes, late: LateModules | None = None) -> None:
    try:
        if late is not None and late in sys.meta_path:
            late.__exit__()
        capture = _capture_of(**pickle.loads(settings))
        capture.__enter__()
        capture.discard(if_empty=True)
        # at the start of the work, `multiprocessing` forgets this, and calls what `ForkWatch` has registered
        util.Finalize(None, capture.close, exitpriority=100)
    except Exception as error:
        print(f"opgrip: process {os.getpid()} is not recorded: {one_line(error)}", file=sys.stderr)


def _capture_of(root: Path, policy: Any, options: Mapping[str, Any]) -> Capture:
    from opgrip.capture.session.capture import Capture

    class ChildCapture(Capture):
        def __init__(self) -> None:
            path = child_path(root)
            super().__init__(path, **options)
            # neither number nor rank are added to this name
            self.path = self._file = self._asked_file = path
            self._root = root
            self._recorder.privacy = policy

        def _warn(self) -> None:
            # the process that runs the program reports only its own problems, as for forked processes
            pass

    return ChildCapture()
