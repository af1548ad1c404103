"""Paths of traces, one per process: ranks of a distributed program, and child processes that a program forks."""

from __future__ import annotations

import atexit
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import pool, process, util
from pathlib import Path
from typing import Any
from weakref import WeakSet

# functions that return the fields of a trace's name: host, process id, rank (0 without one), UTC time such as
# 20260131T235959, number of the recording within the process, percent sign
FIELDS: dict[str, Callable[[], str]] = {
    "h": socket.gethostname,
    "p": lambda: str(os.getpid()),
    "r": lambda: str(rank() or 0),
    "t": lambda: time.strftime("%Y%m%dT%H%M%S", time.gmtime()),
    "n": lambda: "1",
    "%": lambda: "%",
}
FIELD = re.compile(r"%(.?)", re.DOTALL)


def own_path(path: str | Path, number: int = 1) -> str | Path:
    """Return the path for the output of this process, with fields such as `%p` replaced."""
    pattern = str(path)
    if pattern == "-":
        return path
    fields = FIELDS | {"n": lambda: str(number)}
    own: str | Path = FIELD.sub(lambda field: fields.get(field[1], lambda: field[0])(), pattern)
    if rank() is not None and "%r" not in pattern and "%p" not in pattern:
        own = with_mark(own, f"rank{rank()}")
    return path if str(own) == pattern else own


def unused(path: Path) -> Path:
    """Return `path`, with a number before its suffixes if a trace or a file of full values exists there."""
    # import here, because modules that run before torch is loaded import this module
    from opgrip.traces.io.tensor_file import values_path

    number, free = 1, path
    while os.path.lexists(free) or os.path.lexists(values_path(free)):
        number += 1
        free = with_mark(path, str(number))
    return free


def child_path(path: str | Path) -> Path:
    return with_mark(path, f"pid{os.getpid()}")


CUT = r"\.part(\d+)-\d+\.pid\1"  # mark of a trace that a child process is writing, or could not end


def _is_being_written(path: Path) -> bool:
    number = re.search(CUT, path.name)
    try:
        os.kill(int(number[1]) if number else 0, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


class ChildFiles:
    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._before = self._find()
        self._cut_before = self._find(CUT)

    def new(self) -> tuple[Path, ...]:
        return tuple(child for child, identity in self._find().items() if self._before.get(child) != identity)

    def old(self) -> tuple[Path, ...]:
        return tuple(child for child, identity in self._find().items() if self._before.get(child) == identity)

    def cut(self) -> tuple[Path, ...]:
        return tuple(path for path in self._find(CUT) if path not in self._cut_before and not _is_being_written(path))

    def remove_old(self) -> None:
        from opgrip.traces.io.tensor_file import values_path

        for child in self.old():
            for file in (child, values_path(child)):
                with suppress(OSError):
                    file.unlink(missing_ok=True)

    def _find(self, mark: str = r"\.pid\d+") -> dict[Path, tuple[int, int]]:
        stem, dot, suffixes = self._path.name.partition(".")
        form = re.compile(rf"{re.escape(stem)}{mark}{re.escape(dot + suffixes)}")
        children = {}
        with suppress(OSError):
            for child in sorted(self._path.parent.iterdir()):
                if form.fullmatch(child.name):
                    children[child] = (child.stat().st_ino, child.stat().st_mtime_ns)
        return children


class ForkWatch:
    def __init__(self, forked: Callable[[], None], ended: Callable[[], None], between: Callable[[], None]) -> None:
        self.forked = forked
        self.ended = ended
        self.between = between
        self.active = False
        if not _watches:
            os.register_at_fork(after_in_child=_after_fork)
        _watches.add(self)
        # a child of multiprocessing clears all exit handlers before it calls this
        util.register_after_fork(self, _at_end_of_child)
        # this process may be a child that has done so, and has just loaded torch
        _call_before_results(self)


_watches: WeakSet[ForkWatch] = WeakSet()


def _after_fork() -> None:
    for watch in list(_watches):
        if watch.active:
            watch.forked()
            atexit.register(watch.ended)


def _at_end_of_child(watch: ForkWatch) -> None:
    if watch.active:
        util.Finalize(None, watch.ended, exitpriority=100)
        _call_before_results(watch)


def _call_before_results(watch: ForkWatch) -> None:
    current: Any = process.current_process()
    if getattr(current, "_target", None) is not pool.worker:  # type: ignore[attr-defined]
        return
    results = current._args[1]
    put = results.put

    def put_after(result: Any) -> None:
        if watch.active:
            watch.between()
        put(result)

    results.put = put_after


def rank() -> int | None:
    """Return the rank of this process if a launcher such as torchrun started several processes, else None."""
    number, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not number.isdecimal() or not size.isdecimal() or int(size) < 2:
        return None
    return int(number)


def with_mark(path: str | Path, mark: str) -> Path:
    """Return a path with a mark before its suffixes, such as `step.rank1.jsonl.zst`."""
    path = Path(path)
    stem, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}.{mark}{dot}{suffixes}")
