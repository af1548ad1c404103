"""The journal of a replay: a file next to the output that keeps the rows of finished cases, to resume the replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opgrip.cli.journal import Codec, Journal
from opgrip.replay.results.results import Result
from opgrip.replay.run.request import TORCH, RunRequest, identity

MACHINE_KIND = "machine_kind"  # key of the kind of machine in an identity; their times are not compared


def journal_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.journal")


def open_journal(
    output: Path, request: RunRequest, machine_kind: str, resume: bool, force: bool
) -> Journal[list[Result]]:
    def describe(stored: Any, current: Mapping[str, Any]) -> str:
        return unlike(stored, current) or "of a replay of another trace or with other options"

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
    for key, difference in (
        (TORCH, "of a replay with another version of torch"),
        (MACHINE_KIND, "of a replay on another kind of machine"),
    ):
        if isinstance(stored, dict) and {**stored, key: None} == {**current, key: None}:
            return difference
    return None
