"""One file for each process: ranks of a distributed program, and children that a program forks."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from weakref import WeakSet


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
