"""The journal of a replay: a file next to the output that keeps the rows of finished cases, to resume the replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from types import TracebackType
from typing import Any

from opgrip.cli.journal import NEW_RUN, Codec, Journal
from opgrip.errors import UserError
from opgrip.replay.results.results import Result
from opgrip.replay.run.request import TORCH

MACHINE_KIND = "machine_kind"  # key of the kind of machine in an identity; their times are not compared
TRACES = "traces"  # key of the names of several traces in an identity


def journal_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.journal")


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """The measured rows of one case; or, for one of several traces, its hash, final rows, or header if it is finished.

    trace : name of the trace; empty for measured rows, which contain it
    """

    rows: list[Result]
    trace: str = ""
    trace_hash: str | None = None
    header: dict[str, Any] | None = None

    def to_plain(self) -> Any:
        rows = [row.to_plain() for row in self.rows]
        if not self.trace:
            return rows
        return {"trace": self.trace, "rows": rows, "trace_hash": self.trace_hash, "header": self.header}

    @classmethod
    def from_plain(cls, record: Any) -> JournalRecord:
        about = {"rows": record} if isinstance(record, list) else record
        return cls(**{**about, "rows": [Result.from_plain(cells) for cells in about["rows"]]})


class ReplayJournal:
    """The rows of one trace, or of several by the name of their trace.

    identity : facts that two replays must share if rows of both are to be in one table
    hashes : hash of each of several traces; None for a trace that cannot be read
    finished : final rows and header of each finished trace
    """

    def __init__(
        self,
        output: Path,
        identity: Mapping[str, Any],
        resume: bool,
        replace: bool,
        hashes: Mapping[str, str | None] | None = None,
    ) -> None:
        codec = Codec(JournalRecord.to_plain, JournalRecord.from_plain)
        self.path = journal_path(output)
        self.finished: dict[str, tuple[list[Result], dict[str, Any]]] = {}
        self._hashes = hashes or {}
        self._stored_hashes: dict[str, str | None] = {}
        self._measured: dict[str, dict[int, list[Result]]] = {}
        self._final: dict[str, dict[int, list[Result]]] = {}
        self._journal = Journal(self.path, identity, codec, resume, replace, blamed=output, describe=_difference)
        for record in self._journal.items:
            self._enter(record)
        changed = [name for name, trace_hash in self._stored_hashes.items() if trace_hash != self._hashes.get(name)]
        if changed:
            self._journal.close()
            names = ", ".join(changed)
            raise UserError(
                f"{self.path} contains rows of a replay of different files named {names}",
                f"use the same files, or {NEW_RUN}",
            )

    def measured(self, trace: str) -> dict[int, list[Result]]:
        """Return the rows of the finished cases of a trace, as they were before repeats and analyses."""
        return dict(self._measured.get(trace, {}))

    @property
    def is_empty(self) -> bool:
        return not self._journal.items

    def add(self, rows: list[Result]) -> None:
        trace = rows[0].trace
        if trace in self._hashes and trace not in self._stored_hashes:
            self._add(JournalRecord([], trace, self._hashes[trace]))
        self._add(JournalRecord(rows))

    def finish(self, trace: str, rows: list[Result], header: dict[str, Any]) -> None:
        for _, own in groupby(rows, key=lambda row: row.case):
            self._add(JournalRecord(list(own), trace))
        self._add(JournalRecord([], trace, header=header))

    def _add(self, record: JournalRecord) -> None:
        self._journal.add(record)
        self._enter(record)

    def _enter(self, record: JournalRecord) -> None:
        if not record.trace:
            self._measured.setdefault(record.rows[0].trace, {})[record.rows[0].case] = record.rows
        elif record.header is not None:
            cases = self._final.pop(record.trace, {}).values()
            self.finished[record.trace] = list(chain.from_iterable(cases)), record.header
        elif record.rows:
            # a replay that was killed here writes them again
            self._final.setdefault(record.trace, {})[record.rows[0].case] = record.rows
        else:
            self._stored_hashes[record.trace] = record.trace_hash

    def __enter__(self) -> ReplayJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._journal.close()


def _difference(stored: Any, current: Mapping[str, Any]) -> str:
    for key, difference in (
        (TORCH, "of a replay with another version of torch"),
        (MACHINE_KIND, "of a replay on another kind of machine"),
    ):
        if isinstance(stored, dict) and {**stored, key: None} == {**current, key: None}:
            return difference
    return f"of a replay of {'other traces' if TRACES in current else 'another trace'} or with other options"
