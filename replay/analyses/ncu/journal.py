"""Finished batches, in a file next to the results, so that an interrupted run under ncu can go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opgrip.cli.journal import Codec, Journal
from opgrip.replay.analyses.ncu.ncu_report import NcuColumns
from opgrip.replay.analyses.profiler_programs import Key


@dataclass(frozen=True, slots=True)
class Batch:
    """The outcome of a batch.

    Attributes
    ----------
    added : columns that it adds, by row
    outside : number of kernels in its report that belong to no row
    """

    number: int
    added: Mapping[Key, NcuColumns]
    outside: int


def batches_path(output: Path) -> Path:
    """Return where the batches are kept whose rows are to become part of this file."""
    return output.with_name(f"{output.name}.ncu-journal")


def open_batches(path: Path | None, run_options: Mapping[str, Any], resume: bool) -> Journal[Batch]:
    """Open the journal of a run under ncu; see `Journal`."""
    return Journal(path, run_options, Codec(_encoded, _decoded), resume, replace=True)


def _encoded(batch: Batch) -> dict[str, Any]:
    rows = [[*key, asdict(added)] for key, added in batch.added.items()]
    return {"batch": batch.number, "rows": rows, "outside": batch.outside}


def _decoded(record: Any) -> Batch:
    added = {(case, label): NcuColumns(**cells) for case, label, cells in record["rows"]}
    return Batch(record["batch"], added, record["outside"])
