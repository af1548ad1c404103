"""A sign of life while torch is loaded, which takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CLEAR = "\r\x1b[K"


@contextmanager
def loading(prog: str) -> Iterator[None]:
    """On a terminal, a line that says so while the block runs, and then goes; elsewhere nothing."""
    if "torch" in sys.modules or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    sys.stderr.write(f"{prog}: loading torch ...")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write(CLEAR)
        sys.stderr.flush()
