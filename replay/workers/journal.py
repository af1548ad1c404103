"""The journal of a replay: a file next to the output that keeps the rows of finished cases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opgrip.cli.journal import Codec, Journal
from opgrip.replay.results.results import Result
from opgrip.replay.run.cells import measured_row
from opgrip.replay.run.request import TORCH, RunRequest, identity

MACHINE_KIND = "machine_kind"
"""key of the machine kind in an identity; times of different kinds are not mixed"""


def journal_path(output: Path) -> Path:
    """Return the path of the journal for an output."""
    return output.with_name(f"{output.name}.journal")


def open_journal(
    output: Path, request: RunRequest, machine_kind: str, resume: bool, force: bool
) -> Journal[list[Result]]:
    """Open the journal of an output; see `Journal`."""

    def describe(stored: Any, asked: Mapping[str, Any]) -> str:
        return unlike(stored, asked) or "of another trace or with other options"

    return Journal(
        journal_path(output),
        {**identity(request), MACHINE_KIND: machine_kind},
        Codec(_encoded, _decoded),
        resume,
        force,
        blamed=output,
        describe=describe,
    )


def _encoded(rows: list[Result]) -> list[dict[str, Any]]:
    return [row.to_plain() for row in rows]


def _decoded(record: Any) -> list[Result]:
    rows = [measured_row(cells) for cells in record]
    if not rows:
        raise ValueError("a case has rows")
    return rows


def unlike(stored: Any, asked: Mapping[str, Any]) -> str | None:
    """Describe rows from another version of torch or another kind of machine; None if other facts differ too."""
    for key, difference in ((TORCH, "of another version of torch"), (MACHINE_KIND, "of another kind of machine")):
        if isinstance(stored, dict) and {**stored, key: None} == {**asked, key: None}:
            return difference
    return None
