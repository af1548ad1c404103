"""Finished batches in a file beside the results, so that an interrupted run under ncu can resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opgrip.cli.output_files import open_ordinary
from opgrip.errors import UserError
from opgrip.replay.analyses.ncu.ncu_report import NcuColumns
from opgrip.replay.analyses.profiler_programs import Key


@dataclass(frozen=True, slots=True)
class Batch:
    """Results of a batch.

    added : columns by row
    outside : kernels in its report that belong to no row
    """

    added: Mapping[Key, NcuColumns]
    outside: int


def batches_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.ncu-journal")


class Batches:
    """Batches of a run under ncu, each on disk when `add` returns.

    path : None to keep them in memory only
    run_options : must be equal to resume a run
    done : batches by number
    Raises `UserError` if the file is of another run.
    """

    def __init__(self, path: Path | None, run_options: Mapping[str, Any], resume: bool) -> None:
        self.done: dict[int, Batch] = {}
        self._path = path
        if path is None:
            return
        run_options = json.loads(json.dumps(run_options))
        exists = path.exists()
        open_ordinary(path).close()
        if exists and resume:
            self._read(path, run_options)
        else:
            path.write_text(json.dumps(run_options) + "\n", encoding="utf-8")

    def add(self, number: int, batch: Batch) -> None:
        self.done[number] = batch
        if self._path is not None:
            rows = [[*key, asdict(added)] for key, added in batch.added.items()]
            record = {"batch": number, "rows": rows, "outside": batch.outside}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _read(self, path: Path, run_options: Mapping[str, Any]) -> None:
        whole = 0
        for place, line in enumerate(path.read_bytes().splitlines(keepends=True)):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                if place:
                    added = {(case, label): NcuColumns(**cells) for case, label, cells in record["rows"]}
                    self.done[record["batch"]] = Batch(added, record["outside"])
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"{path} is damaged in line {place + 1}", "begin anew with --force") from error
            if not place and record != run_options:
                raise UserError(f"{path} is of a run with other options", "give the same, or begin anew with --force")
            whole += len(line)
        # what follows the last whole line is half a record
        with path.open("r+b") as file:
            file.truncate(whole)
