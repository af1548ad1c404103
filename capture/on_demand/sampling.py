"""Periodic recordings of a process, and removal of old recordings to limit disk space."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from opgrip.capture.on_demand.agent import Agent
from opgrip.capture.on_demand.protocol import RecordingRequest
from opgrip.capture.on_demand.settings import folder_of, is_of_pattern
from opgrip.errors import UserError, one_line

if TYPE_CHECKING:
    from opgrip.capture.on_demand.seen import SeenSignatures

MOST_HEADER = 1 << 20


class Sampler:
    """Records some steps at regular intervals while the process runs."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._last_problem = ""
        self._seen: SeenSignatures | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="opgrip-sampler", daemon=True).start()

    def _run(self) -> None:
        settings, pause = self._agent.settings, threading.Event()
        while not pause.wait(settings.every_s):
            if self._agent.is_recording:
                # a recording on request is running
                continue
            try:
                # stop waiting for a step when the next interval begins
                result = self._agent.record(RecordingRequest(wait_s=settings.every_s or 1.0, sampled=True))
                problem = result["problem"]
                if settings.new_only and result["file"] is not None:
                    self._keep_what_is_new(Path(result["file"]))
                if settings.max_disk_bytes is not None:
                    make_room(settings.output, settings.max_disk_bytes)
            except Exception as error:
                problem = str(error) if isinstance(error, UserError) else one_line(error)
            if problem and problem != self._last_problem:
                # report it only once
                print(f"opgrip: {problem}", file=sys.stderr, flush=True)
            self._last_problem = problem or ""

    def _keep_what_is_new(self, recording: Path) -> None:
        """Add a recording's calls to the counts of its service (see `seen.py`), and remove the file if the service has
        called all of its signatures before.
        """
        from opgrip.capture.on_demand.seen import SeenSignatures
        from opgrip.traces.io.tensor_file import values_path

        if self._seen is None:
            settings = self._agent.settings
            self._seen = SeenSignatures(recording.parent, None if settings.options.get("private") else settings.name)
        if not self._seen.add(recording):
            for file in (recording, values_path(recording)):
                file.unlink(missing_ok=True)


def make_room(pattern: str, most_bytes: int) -> list[Path]:
    """Remove the oldest periodic recordings until the remaining ones take at most `most_bytes`, and return the removed
    files.

    The newest recording stays. `pattern` is the pattern of the recordings' paths.
    """
    from opgrip.traces.io.tensor_file import values_path

    files = [
        path
        for path in folder_of(pattern).iterdir()
        if is_of_pattern(path.name, pattern) and is_own(path) and is_sampled(path)
    ]
    files.sort(key=_changed_ns)
    sizes = {path: sum(_size(file) for file in (path, values_path(path))) for path in files}
    removed = []
    for path in files[:-1]:
        if sum(sizes.values()) <= most_bytes:
            break
        for file in (path, values_path(path)):
            file.unlink(missing_ok=True)
        del sizes[path]
        removed.append(path)
    return removed


def is_own(path: Path) -> bool:
    """Return True for a regular file of this user; other users may create files and links in the folder."""
    with suppress(OSError):
        about = path.lstat()
        return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
    return False


def is_sampled(path: Path) -> bool:
    """Return True if the first line of a file marks it as a periodic recording."""
    from opgrip.cli.output_files import Damage, read_chunks

    line = b""
    with suppress(OSError, ValueError, RecursionError, UserError, Damage):
        for chunk in read_chunks(path):
            start, end, _ = chunk.partition(b"\n")
            line += start
            if end or len(line) > MOST_HEADER:
                break
        header = json.loads(line)
        about = header.get("on_demand") if isinstance(header, dict) else None
        return isinstance(about, dict) and about.get("sampled") is True
    return False


def _size(path: Path) -> int:
    # another process may have removed it
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _changed_ns(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0
