"""What a process may answer: nothing else comes by, whatever listens there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opgrip.capture.on_demand.words import DONE
from opgrip.cli.command import printable
from opgrip.errors import shortened

KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("answer", "why", "name", "command"), (str,)),
    **dict.fromkeys(("torch", "job", "file", "limit", "problem"), (str, type(None))),
    **dict.fromkeys(("parent", "recordings", "steps", "cut", "calls", "signatures", "dropped", "bytes"), (int,)),
    **dict.fromkeys(("rank", "world_size", "position", "began_at"), (int, type(None))),
    **dict.fromkeys(("recording", "stopped"), (bool,)),
    "notes": (list,),
}
"""Of the fields that are looked at here."""
OF_A_FILE = ("steps", "calls", "signatures", "dropped", "bytes")
"""What is said of a recording beside its file."""
MOST_NUMBER = 1 << 63
MOST_TEXT = 40


def check_answer(answer: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an answer whose fields are not of their kinds, or that lacks some."""
    for name, value in answer.items():
        if name in KINDS and not _is_of_kind(value, KINDS[name]):
            raise ValueError(f"{name} cannot be {printable(shortened(repr(value), MOST_TEXT))}")
    if answer.get("answer") == DONE and answer.get("file"):
        missing = next((name for name in OF_A_FILE if name not in answer), None)
        if missing is not None:
            raise ValueError(f"{missing} is missing")


def _is_of_kind(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int):
        return int in kinds and 0 <= value < MOST_NUMBER
    if isinstance(value, list):
        return list in kinds and all(isinstance(item, str) for item in value)
    return isinstance(value, kinds)
