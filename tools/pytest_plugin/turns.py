"""Lets one process at a time measure, where several run tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEY = "opgrip_folder"


class Turns:
    """What the workers of a run of pytest-xdist share.

    Parameters
    ----------
    folder : that all of them have; None where tests run in one process
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other worker measures."""
        if self.folder is None:
            yield
            return
        import fcntl

        with (self.folder / "turn").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # a process that was forked meanwhile has the file open too
                fcntl.flock(file, fcntl.LOCK_UN)


class SharedFolder:
    """A plug-in of the process that starts workers: gives each of them the same temporary folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="opgrip-pytest-")

    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker, before it starts."""
        node.workerinput[KEY] = self._folder.name

    def pytest_unconfigure(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
