"""What a case raises that cannot run here."""

from __future__ import annotations


class Unsupported(Exception):
    """A case that cannot run here, by the reason."""
