"""Where the sockets of processes are that can be asked: a folder that only their user can enter."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from opgrip.errors import UserError

SUFFIX = ".sock"
MOST_BYTES = 100
"""Of a socket's path: the system takes 107."""
PRIVATE = 0o700


def make_folder() -> Path:
    """The folder of this user, made where there is none.

    Raises
    ------
    UserError : where it is not this user's alone
    """
    problem: UserError | None = None
    for folder in _own_folders(os.geteuid()):
        if len(bytes(folder)) > MOST_BYTES - 24 or not folder.parent.is_dir():
            continue
        try:
            folder.mkdir(PRIVATE, exist_ok=True)
            check_private(folder)
            if folder.lstat().st_uid != os.geteuid():
                # root may enter it, and so may whose it is
                raise UserError(f"{folder} is another user's", "set XDG_RUNTIME_DIR to a folder of your own")
            return folder
        except OSError as error:
            problem = UserError(f"{folder} cannot be made", str(error.strerror).lower())
        except UserError as error:
            problem = error
    raise problem or UserError("there is no folder for sockets", "set XDG_RUNTIME_DIR to a folder of a short name")


def check_private(folder: Path) -> None:
    """Raise `UserError` where another user can enter a folder, or it is another's."""
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise UserError(f"{folder} is no folder", "remove it")
    if about.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise UserError(f"{folder} is another user's", "set XDG_RUNTIME_DIR to a folder of your own")
    if about.st_mode & 0o077:
        raise UserError(f"{folder} is open to other users", f"close it: chmod 700 {folder}")


def sockets() -> Iterator[Path]:
    """The sockets of the processes that this user may ask; of all users for root."""
    for folder in dict.fromkeys(_all_folders()):
        with suppress(OSError, UserError):
            check_private(folder)
            yield from sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)


def socket_path(folder: Path) -> Path:
    """A name for this process's socket that no other one has."""
    return folder / f"{os.getpid()}-{os.urandom(4).hex()}{SUFFIX}"


def pid_of(path: Path) -> int | None:
    """The process that a socket's name says it is of."""
    number = path.name.partition("-")[0]
    return int(number) if number.isdecimal() else None


def _own_folders(user: int) -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime) / "opgrip"
    # what asks may run without the variable that the process had
    yield Path(f"/run/user/{user}/opgrip")
    yield Path(os.environ.get("TMPDIR") or "/tmp") / f"opgrip-{user}"
    yield Path("/tmp") / f"opgrip-{user}"


def _all_folders() -> Iterator[Path]:
    yield from _own_folders(os.geteuid())
    if os.geteuid() == 0:
        yield from Path("/run/user").glob("*/opgrip")
        yield from Path("/tmp").glob("opgrip-*")
