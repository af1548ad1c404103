"""What a trace may call, and the refusal of what cannot run here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec

TRUSTED_EXTENSIONS = ("mmcv._ext",)
"""Extension modules that a trace may name: each runs as code here, so a stranger's trace cannot add to them."""


class Unsupported(Exception):
    """A case that cannot run here, by the reason."""


def absent_extensions(names: Iterable[str]) -> Iterator[str]:
    """A line for each module that is not installed here."""
    for name in names:
        try:
            is_absent = find_spec(name) is None
        except (ImportError, ValueError):
            is_absent = True
        if is_absent:
            yield f"--extension {name}: no such module is installed, and its functions cannot run"
