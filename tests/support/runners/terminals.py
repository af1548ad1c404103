"""Terminal that records the output of a command."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading
from dataclasses import dataclass

import pyte
from forks import run_forked
from programs import program_path

LINES = 2000  # lines of the terminal, enough that no output scrolls off


@dataclass(frozen=True)
class Shown:
    """Text shown on a terminal, and the bytes sent to it."""

    lines: list[str]
    sent: bytes

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def show(width: int, name: str, *args: object, **variables: str) -> Shown:
    """Run one of the project's commands on a terminal with `width` columns; `variables` are added to its
    environment.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, width, 0, 0))
    chunks: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(ours, chunks))
    reader.start()
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    try:
        done = run_forked(
            [program_path(name), *map(str, args)], env={**env, "TERM": "xterm-256color", **variables}, terminal=theirs
        )
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    assert done.returncode == 0, done.stderr
    screen = pyte.Screen(width, LINES)
    sent = b"".join(chunks)
    pyte.ByteStream(screen).feed(sent)
    return Shown([line.rstrip() for line in screen.display], sent)


def _read_all(terminal: int, chunks: list[bytes]) -> None:
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:
            # Linux reports in this way that the other end was closed
            return
        if not chunk:
            return
        chunks.append(chunk)
