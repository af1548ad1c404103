"""The modules that a trace may name, and the error for cases that cannot run here."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType

from opgrip.cli.command import own_python
from opgrip.errors import UserError

IMPORT_S = 120
IMPORTED = 76
"""exit status that confirms an import; an extension that ends the process itself has another one"""

MMCV = "mmcv._ext"
TRUSTED_EXTENSIONS = (MMCV,)
"""extension modules that a trace may name; they run as code, so an untrusted trace cannot add to them"""


def import_trusted(name: str) -> ModuleType:
    """Import a module that the user names; installed modules come before those in the working directory."""
    with _working_directory():
        return importlib.import_module(name)


@contextmanager
def _working_directory() -> Iterator[None]:
    """Make modules in the working directory importable in the block, after installed modules."""
    sys.path.append("")
    try:
        yield
    finally:
        sys.path.remove("")


class Unsupported(Exception):
    """Raised if a case cannot run here; the message is the reason."""


def absent_extensions(names: Iterable[str]) -> Iterator[str]:
    """Yield one message per module that is not installed."""
    for name in names:
        if not is_installed(name):
            yield f"--extension {name}: no such module is installed, and its functions cannot run"


def is_installed(name: str) -> bool:
    """Return True if a module can be found, without importing the packages that contain it."""
    first, *others = name.split(".")
    full_name = first
    try:
        with _working_directory():
            spec = find_spec(first)
        for part in others:
            places = None if spec is None else spec.submodule_search_locations
            if places is None:
                return False
            full_name = f"{full_name}.{part}"
            spec = PathFinder.find_spec(full_name, list(places))
    except (ImportError, ValueError):
        return False
    return spec is not None


def check_import(name: str) -> None:
    """Import a module in another process, since it may crash or hang; raise `UserError` if it cannot be imported."""
    try:
        done = subprocess.run(
            own_python(__name__, name), capture_output=True, text=True, errors="replace", timeout=IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"--extension {name} cannot be imported: it took longer than {IMPORT_S} s") from error
    if done.returncode != IMPORTED:
        ended = f"status {done.returncode}" if done.returncode >= 0 else signal.strsignal(-done.returncode)
        reason = next(reversed(done.stderr.split("\n")[:-1]), "") or f"its process ended: {ended}"
        raise UserError(f"--extension {name} cannot be imported: {reason}")


if __name__ == "__main__":
    import_trusted(sys.argv[1])
    os._exit(IMPORTED)
