"""One file for each process: ranks of a distributed program, and children that a program forks."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from weakref import WeakSet


def own_path(path: str | Path) -> str | Path:
    """Where this process writes what it is told to write to a path: with its rank, where it has one."""
    number = rank()
    return path if number is None or str(path) == "-" else with_mark(path, f"rank{number}")


def child_path(path: str | Path) -> Path:
    """Where this process writes, forked by one that writes to a path."""
    return with_mark(path, f"pid{os.getpid()}")


class ChildFiles:
    """Traces that the children of a process wrote beside its own.

    Parameters
    ----------
    path : of the process's own trace, which is not there yet or is to be replaced
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._before = self._find()

    def new(self) -> tuple[Path, ...]:
        """Those that were written since."""
        return tuple(child for child, identity in self._find().items() if self._before.get(child) != identity)

    def old(self) -> tuple[Path, ...]:
        """Those of an earlier program."""
        return tuple(child for child, identity in self._find().items() if self._before.get(child) == identity)

    def remove_old(self) -> None:
        """Remove those of an earlier program, with the values beside them."""
        # here: modules that run before torch is loaded import this one
        from opgrip.traces.io.tensor_file import values_path

        for child in self.old():
            for file in (child, values_path(child)):
                with suppress(OSError):
                    file.unlink(missing_ok=True)

    def _find(self) -> dict[Path, tuple[int, int]]:
        """The files, and what tells each from another one of its name."""
        stem, dot, suffixes = self._path.name.partition(".")
        form = re.compile(rf"{re.escape(stem)}\.pid\d+{re.escape(dot + suffixes)}")
        children = {}
        with suppress(OSError):
            for child in sorted(self._path.parent.iterdir()):
                if form.fullmatch(child.name):
                    children[child] = (child.stat().st_ino, child.stat().st_mtime_ns)
        return children


class ForkWatch:
    """Calls `forked` in every child that the process forks, and `ended` when such a child ends.

    Neither is called where the child ends without Python's knowledge, as by `os._exit` or a signal.
    """

    def __init__(self, forked: Callable[[], None], ended: Callable[[], None]) -> None:
        self.forked = forked
        self.ended = ended
        self.active = False
        if not _watches:
            os.register_at_fork(after_in_child=_after_fork)
        _watches.add(self)
        # a child of multiprocessing forgets all that is to be done at its end, and then calls this
        util.register_after_fork(self, _at_end_of_child)


_watches: WeakSet[ForkWatch] = WeakSet()


def _after_fork() -> None:
    for watch in list(_watches):
        if watch.active:
            watch.forked()
            atexit.register(watch.ended)


def _at_end_of_child(watch: ForkWatch) -> None:
    if watch.active:
        util.Finalize(None, watch.ended, exitpriority=100)


def rank() -> int | None:
    """The rank of this process, where a launcher such as torchrun started several; None elsewhere."""
    number, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not number.isdecimal() or not size.isdecimal() or int(size) < 2:
        return None
    return int(number)


def with_mark(path: str | Path, mark: str) -> Path:
    """A file name with a mark before its suffixes: `step.jsonl.zst` and `rank1` give `step.rank1.jsonl.zst`."""
    path = Path(path)
    stem, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}.{mark}{dot}{suffixes}")
