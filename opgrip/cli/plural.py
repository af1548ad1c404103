"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A number and what it counts: `1 case`, `1,200 cases`.

    Parameters
    ----------
    plural : of the noun, where that is not the noun and an `s`
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


STEP = "opgrip step"
"""How the labels of the steps of a recording begin that was asked for."""
DEVICE_TIME = "times are of the device for calls that worked on one"
"""What is said above times that are not all of the host."""
