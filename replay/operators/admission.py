"""What a trace may call, and the refusal of what cannot run here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

TRUSTED_EXTENSIONS = ("mmcv._ext",)
"""Extension modules that a trace may name: each runs as code here, so a stranger's trace cannot add to them."""


def import_trusted(name: str) -> ModuleType:
    """Import a module that the user names, from where modules are installed, else from the working directory.

    Raises
    ------
    ImportError : where there is none
    """
    with _working_directory():
        return importlib.import_module(name)


@contextmanager
def _working_directory() -> Iterator[None]:
    """Modules of the working directory are found in the block, after those that are installed."""
    sys.path.append("")
    try:
        yield
    finally:
        sys.path.remove("")


class Unsupported(Exception):
    """A case that cannot run here, by the reason."""


def absent_extensions(names: Iterable[str]) -> Iterator[str]:
    """A line for each module that is not installed here."""
    for name in names:
        try:
            with _working_directory():
                is_absent = find_spec(name) is None
        except (ImportError, ValueError):
            is_absent = True
        if is_absent:
            yield f"--extension {name}: no such module is installed, and its functions cannot run"
