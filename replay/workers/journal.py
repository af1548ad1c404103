"""The journal of a replay: a file next to the output that keeps the rows of finished cases, to resume the replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opgrip.cli.journal import Codec, Journal
from opgrip.replay.results.results import Result
from opgrip.replay.run.request import TORCH, RunRequest, identity

MACHINE_KIND = "machine_kind"  # key of the kind of machine in an identity; times of different kinds are not mixed


def journal_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.journal")


def open_journal(
    output: Path, request: RunRequest, machine_kind: str, resume: bool, force: bool
) -> Journal[list[Result]]:
    """Open the journal of an output file, whose cases are reused for the same request on the same kind of machine."""

    def describe(stored: Any, current: Mapping[str, Any]) -> str:
        return unlike(stored, current) or "of another trace or with other options"

    return Journal(
        journal_path(output),
        {**identity(request), MACHINE_KIND: machine_kind},
        Codec(
            lambda rows: [row.to_plain() for row in rows], lambda record: [Result.from_plain(cells) for cells in record]
        ),
        resume,
        force,
        blamed=output,
        describe=describe,
    )


def unlike(stored: Any, current: Mapping[str, Any]) -> str | None:
    """Return a text if stored rows differ only in torch's version, or only in the kind of machine; else None.

    stored, current : identities of the replay of the stored rows, and of the current replay
    """
    for key, difference in ((TORCH, "of another version of torch"), (MACHINE_KIND, "of another kind of machine")):
        if isinstance(stored, dict) and {**stored, key: None} == {**current, key: None}:
            return difference
    return None
