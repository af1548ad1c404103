"""What a trace may call, and the refusal of what cannot run here."""

from __future__ import annotations

TRUSTED_EXTENSIONS = ("mmcv._ext",)
"""Extension modules that a trace may name: each runs as code here, so a stranger's trace cannot add to them."""


class Unsupported(Exception):
    """A case that cannot run here, by the reason."""
