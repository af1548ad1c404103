"""What a process and who asks it say to each other: JSON objects, one a line, over a Unix socket."""

from __future__ import annotations

import json
import os
import socket
import struct
from time import monotonic
from typing import Any

PROTOCOL = 1
"""A process refuses a request of another one in a line."""
MOST_BYTES = 1 << 16
"""Of a message."""
TELL, RECORD, STOP = REQUESTS = ("tell", "record", "stop")
"""What can be asked for: what the process is, a recording, the end of one."""
ABOUT, ARMED, DONE, REFUSED = ("about", "armed", "done", "refused")
"""What is answered: what the process is, that it waits for a step, what was recorded, why it is not done."""


class Connection:
    """One end of a conversation.

    Parameters
    ----------
    link : a connected socket
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None) -> dict[str, Any] | None:
        """The next message; None where the other end has closed.

        Parameters
        ----------
        seconds : to wait for the whole of it at most; None for ever

        Raises
        ------
        ValueError : for what is no message
        TimeoutError : where it does not come in time
        """
        until = None if seconds is None else monotonic() + seconds
        while b"\n" not in self._buffer:
            if len(self._buffer) > MOST_BYTES:
                raise ValueError(f"a message of more than {MOST_BYTES} bytes")
            remaining = None if until is None else until - monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError("no whole message came in time")
            self._link.settimeout(remaining)
            part = self._link.recv(1 << 14)
            if not part:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except RecursionError as error:
            raise ValueError("a message of too many brackets") from error
        if not isinstance(message, dict):
            raise ValueError("a message is an object")
        return message

    def close(self) -> None:
        """End the conversation."""
        self._link.close()


def may_ask(link: socket.socket) -> bool:
    """Whether the other end is this process's user, or root."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        # the folder and the socket are the user's alone
        return True
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return user in (os.geteuid(), 0)
