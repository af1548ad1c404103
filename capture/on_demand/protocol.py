"""Protocol between agents and clients: location of the agents' sockets, messages, and permissions."""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, TypeAlias, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from opgrip.cli.command import counted
from opgrip.cli.output_files import identity_of
from opgrip.errors import UserError

PROTOCOL = 1  # protocol version; a process refuses requests of another version
# kinds of requests: describe the process, record, end the recording
TELL, RECORD, STOP = REQUESTS = ("tell", "record", "stop")
# kinds of answers: description, recording can begin, reason why no step has begun, facts about the recording, refusal
ABOUT, ARMED, WAITING, DONE, REFUSED = ("about", "armed", "waiting", "done", "refused")

_MOST_MESSAGE_BYTES = 1 << 16
_SUFFIX = ".sock"
_MOST_PATH_BYTES = 100  # maximum number of bytes of a socket's path; the system's limit is 107
_PRIVATE = 0o700


class OwnSocket:
    """A socket, which is detached when the program has closed its descriptor or uses the number for another file."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._identity = identity_of(link.fileno())

    @property
    def link(self) -> socket.socket:
        if identity_of(self._link.fileno()) != self._identity:
            self._link.detach()
        return self._link


class MessageSocket(OwnSocket):
    def __init__(self, link: socket.socket) -> None:
        super().__init__(link)
        self._buffer = b""

    def send(self, message: Mapping[str, Any]) -> None:
        self.link.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None) -> dict[str, Any] | None:
        """Return the next message, or None if the other process has closed the connection."""
        until = None if seconds is None else monotonic() + seconds
        while b"\n" not in self._buffer:
            if len(self._buffer) > _MOST_MESSAGE_BYTES:
                raise ValueError(f"a message has more than {_MOST_MESSAGE_BYTES} bytes")
            remaining = None if until is None else until - monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError("no complete message arrived in time")
            self.link.settimeout(remaining)
            part = self.link.recv(1 << 14)
            if not part:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            message = json.loads(line)
        except RecursionError as error:
            raise ValueError("a message has too many nested brackets") from error
        if not isinstance(message, dict):
            raise ValueError(f"a message is not a JSON object: {str(message)[:60]}")
        return message

    def close(self) -> None:
        self.link.close()


def peer_of(link: socket.socket) -> tuple[int, int] | None:
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    pid, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return pid, user


def may_ask(link: socket.socket) -> bool:
    """Return False if the process at the other end of a connection belongs to another user, except root."""
    peer = peer_of(link)
    # without peer credentials, the folder and the socket are private to the user
    return peer is None or peer[1] in (os.geteuid(), 0)


_Fields = TypeVar("_Fields")
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class RecordingRequest:
    """A client's request to record; a field that is None leaves the choice to the process.

    seconds : time in seconds during which steps to record may begin
    wait_s : time in seconds after which the request fails if no step begins
    """

    output: str | None = None
    steps: Annotated[int, Meta(gt=0)] | None = None
    seconds: _Seconds | None = None
    warmup: _Count | None = None
    step_module: str | None = None
    wait_s: _Seconds = 60.0
    options: dict[str, Any] = field(default_factory=dict)


class _Answer(TypedDict, total=False):
    # fields of answers that clients read; other fields are ignored
    answer: str
    why: str
    name: str
    command: str
    torch: str | None
    rank: int | None
    parent: _Count
    recording: bool
    recordings: _Count
    stopped: bool
    file: str | None
    problem: str | None
    limit: str | None
    steps: _Count
    cut: _Count
    calls: _Count
    signatures: _Count
    dropped: _Count
    bytes: _Count
    notes: list[str]


_WITH_FILE = ("steps", "calls", "signatures", "dropped", "bytes")  # fields of an answer about a file


def check_request(request: Mapping[str, Any]) -> str:
    if request.get("protocol") != PROTOCOL:
        raise ValueError(
            f"the request does not use protocol {PROTOCOL}, as this process does: use one version of opgrip for both"
        )
    word = request.get("do")
    if word not in REQUESTS:
        raise ValueError(f"unknown request: expected {', '.join(REQUESTS)}")
    return str(word)


def request_of(message: Mapping[str, Any]) -> RecordingRequest:
    names = [item.name for item in fields(RecordingRequest)]
    return _converted({name: message[name] for name in names if message.get(name) is not None}, RecordingRequest)


def check_answer(answer: Mapping[str, Any]) -> None:
    _converted(answer, _Answer)
    if answer.get("answer") == DONE and answer.get("file"):
        missing = next((name for name in _WITH_FILE if name not in answer), None)
        if missing is not None:
            raise ValueError(f"`{missing}` of the recording is missing")


def _converted(values: Mapping[str, Any], kind: type[_Fields]) -> _Fields:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def lines_of(result: Mapping[str, Any]) -> list[str]:
    if result.get("problem"):
        return [f"no trace was written: {result['problem']}"]
    if not result.get("file"):
        return ["no trace was written: no operator was called in the steps"]
    parts = [
        counted(result["steps"], "step"),
        f"{counted(result['calls'], 'call')} of {counted(result['signatures'], 'signature')}",
        f"{result['bytes'] / 1000:,.0f} kB",
    ]
    lines = [f"{', '.join(parts)}, to {result['file']}"]
    if result.get("cut"):
        lines.append(
            f"{counted(result['cut'], 'step')} did not end before the recording; the trace has the calls up to then"
        )
    if result.get("dropped"):
        lines.append(f"{counted(result['dropped'], 'call')} could not be recorded")
    if result.get("limit"):
        lines.append(f"the recording ended at the limit of {result['limit']}")
    return [*lines, *result.get("notes", ())]


def make_folder() -> Path:
    problem: UserError | None = None
    for folder in _own_folders(os.geteuid()):
        if len(bytes(folder)) > _MOST_PATH_BYTES - 24 or not folder.parent.is_dir():
            continue
        try:
            folder.mkdir(_PRIVATE, exist_ok=True)
            check_private(folder)
            if folder.lstat().st_uid != os.geteuid():
                # root may enter it, but its owner may too
                raise UserError(
                    f"{folder} belongs to another user", ("set XDG_RUNTIME_DIR to a folder that only you can enter")
                )
            return folder
        except OSError as error:
            problem = UserError(f"{folder} cannot be created", str(error.strerror).lower())
        except UserError as error:
            problem = error
    raise problem or UserError("no folder for sockets was found", "set XDG_RUNTIME_DIR to a folder with a short name")


def check_private(folder: Path) -> None:
    """Raise `UserError` unless a path is a folder that is closed to other users."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise UserError(f"{folder} is not a folder", "remove it")
    if about.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise UserError(f"{folder} belongs to another user", "set XDG_RUNTIME_DIR to a folder that only you can enter")
    if about.st_mode & 0o077:
        raise UserError(f"{folder} is open to other users", f"make it private: chmod 700 {folder}")


def sockets() -> Iterator[Path]:
    """Yield the paths of agents' sockets in folders that this user can enter."""
    folders = list(_own_folders(os.geteuid()))
    if os.geteuid() == 0:
        folders += [*Path("/run/user").glob("*/opgrip"), *Path("/tmp").glob("opgrip-*")]
    for folder in dict.fromkeys(folders):
        with suppress(OSError, UserError):
            check_private(folder)
            yield from sorted(path for path in folder.iterdir() if path.suffix == _SUFFIX)


def socket_path(folder: Path) -> Path:
    return folder / f"{os.getpid()}-{os.urandom(4).hex()}{_SUFFIX}"


def pid_of(path: Path) -> int | None:
    number = path.name.partition("-")[0]
    return int(number) if number.isdecimal() else None


def _own_folders(user: int) -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime) / "opgrip"
    # the client may run without the variable that the process had
    yield Path(f"/run/user/{user}/opgrip")
    yield Path(os.environ.get("TMPDIR") or "/tmp") / f"opgrip-{user}"
    yield Path("/tmp") / f"opgrip-{user}"
