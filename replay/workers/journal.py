"""Results as they come, in a file beside the one that they go to, so that an interrupted replay can go on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from opgrip.cli.output_files import cannot_be_written, open_ordinary
from opgrip.errors import UserError
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.sources import source_of
from opgrip.replay.results.results import Result
from opgrip.replay.run.cells import measured_row
from opgrip.replay.run.settings import Limits, Plan
from opgrip.replay.workers.job import Job

TORCH, MACHINE_KIND = "torch", "machine_kind"
"""What an identity says of the version of torch, and of the machine."""


def journal_path(output: Path) -> Path:
    """Where the rows are kept that are to become this file."""
    return output.with_name(f"{output.name}.journal")


class Journal:
    """Rows of a replay, case by case, each on disk when `add` returns.

    The file stays until whoever writes the results removes it; one without rows is removed here.

    Parameters
    ----------
    output : the file that the results go to in the end
    machine_kind : what the machines are that add rows: times of others do not stand beside theirs
    resume : go on with the rows of an earlier, interrupted replay of the same job
    force : begin anew where there are such rows

    Attributes
    ----------
    rows : by the number of the case

    Raises
    ------
    UserError : where there are rows and neither is asked for, or they are of another job, or none can be written
    """

    def __init__(self, output: Path, job: Job, machine_kind: str, resume: bool, force: bool) -> None:
        self._output, self.path = output, journal_path(output)
        self.rows: dict[int, list[Result]] = {}
        job_identity = {**identity(job), MACHINE_KIND: machine_kind}
        try:
            self._open(job_identity, resume, force)
        except OSError as error:
            raise cannot_be_written(output, error) from error

    def _open(self, job_identity: dict[str, Any], resume: bool, force: bool) -> None:
        exists = os.path.lexists(self.path)
        file = open_ordinary(self.path)
        try:
            if exists and not resume and not force:
                hint = "go on with --resume, or begin anew with --force"
                raise UserError(f"{self.path} holds the rows of an interrupted replay", hint)
            # what follows the last whole line is half a record
            file.truncate(self._read(file, job_identity) if resume else 0)
            if not file.seek(0, os.SEEK_END):
                file.write(json.dumps(job_identity).encode() + b"\n")
            file.flush()
        except BaseException:
            with suppress(OSError):
                file.close()
            if not exists:
                self.path.unlink()
            raise
        self._file = file

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):
            # what a full disk did not take in `add` is tried once more
            self._file.close()
        if not self.rows:
            with suppress(OSError):
                self.path.unlink()

    def add(self, rows: Sequence[Result]) -> None:
        """Keep the rows of a case; raises `UserError` where they cannot be written."""
        try:
            self._file.write(json.dumps([row.to_plain() for row in rows]).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise cannot_be_written(self._output, error) from error
        self.rows[rows[0].case] = list(rows)

    def _read(self, file: IO[bytes], job_identity: dict[str, Any]) -> int:
        """Take the rows that are there; gives the length of what is whole."""
        whole = 0
        for place, line in enumerate(file):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                if place:
                    rows = [measured_row(row) for row in record]
                    self.rows[rows[0].case] = rows
            except (ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
                raise UserError(f"{self.path} is damaged in line {place + 1}", "begin anew with --force") from error
            if not place and record != job_identity:
                hint = "give the same, or begin anew with --force"
                difference = unlike(record, job_identity, "of another trace or with other options")
                raise UserError(f"{self.path} is {difference}", hint)
            whole += len(line)
        return whole


def identity(job: Job) -> dict[str, Any]:
    """What two replays must have in common for their rows to stand in one table."""
    trace_hash, options = source_of(job.trace).fingerprint(job.trace), options_of(job.selection, job.plan)
    same = {"trace": trace_hash, "options": options, TORCH: str(torch.__version__)}
    return same if job.shard is None else {**same, "shard": asdict(job.shard)}


def unlike(stored: Any, asked: Mapping[str, Any], otherwise: str) -> str | None:
    """What rows are of that those which are asked for would not be, where it is more than one thing `otherwise`."""
    if stored == asked:
        return None
    for apart, difference in ((TORCH, "of another version of torch"), (MACHINE_KIND, "of another kind of machine")):
        if isinstance(stored, dict) and {**stored, apart: None} == {**asked, apart: None}:
            return difference
    return otherwise


def options_of(selection: Selection, plan: Plan) -> dict[str, Any]:
    """The options that decide what the rows of a replay are."""
    plan = replace(plan, limits=Limits(), store=None)
    # as it comes back from the file
    options: dict[str, Any] = json.loads(json.dumps({"selection": asdict(selection), **asdict(plan)}))
    return options


def options_hash(selection: Selection, plan: Plan) -> str:
    """One word for these options, by which shards know each other; each of them may be pinned to other processors."""
    options = options_of(selection, replace(plan, points=replace(plan.points, pin=())))
    return hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=8).hexdigest()
