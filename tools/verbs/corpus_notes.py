"""What was left out of a corpus, told."""

from __future__ import annotations

from collections.abc import Sequence

from opgrip.cli.command import printable
from opgrip.cli.progress import Reporter
from opgrip.errors import shortened

MOST_NOTES, MOST_NOTE = 10, 200


def say_notes(notes: Sequence[str], reporter: Reporter, more: str = "") -> None:
    """Say the first of them.

    Parameters
    ----------
    more : what has all of them
    """
    for note in notes[:MOST_NOTES]:
        reporter.say(shortened(printable(note), MOST_NOTE))
    if len(notes) > MOST_NOTES:
        reporter.say(f"{len(notes) - MOST_NOTES:,} more files were left out{more}")
