"""Whether a file of results is what a replay would write."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opgrip.errors import UserError
from opgrip.replay.reports.cells import read_results
from opgrip.replay.reports.report import report_for
from opgrip.replay.results.results import WAY, Result

OF_CASE = ("case", "op", "count", *(name for name in WAY if name not in ("cache", "method", "device")))
"""Columns that options and the trace set, and no measurement."""
OF_HEADER = ("trace", "trace_hash", "torch", "device", "seed")
OPTIONS = "options_hash"
"""What a header says of the options, how often cases run among them."""


def read_completed(
    path: Path, expected: Sequence[Result], devices: Collection[str], caches: Collection[str], header: Mapping[str, Any]
) -> list[Result]:
    """The rows of a file of results that a replay would write; none where such files cannot be read.

    Parameters
    ----------
    expected : the rows of the replay before they are measured
    devices : that it runs on
    caches : what it finds caches to hold
    header : of the file that it would write

    Raises
    ------
    UserError : where it holds others, as far as such a file tells
    """
    if report_for(path).read is None:
        return []
    rows = read_results(path)
    is_same = sorted(map(_key, rows)) == sorted(map(_key, expected))
    is_same &= {row.device for row in rows} <= {*devices}
    is_same &= {row.cache for row in rows} <= {*caches, None}
    if path.suffix == ".json":
        stored = json.loads(path.read_text(encoding="utf-8"))
        is_same &= all(stored.get(name) == header[name] for name in OF_HEADER)
        # those of earlier versions do not say it
        is_same &= stored.get(OPTIONS) in (None, header[OPTIONS])
    if not is_same:
        raise UserError(f"{path} holds other results", "choose another name, or replace it with --force")
    return rows


def repeated_rows(rows: Iterable[Result], expected: Iterable[Result], caches: Collection[str]) -> list[Result]:
    """Those of some rows that a replay would give again; see `read_completed`."""
    keys = {_key(row) for row in expected}
    return [row for row in rows if _key(row) in keys and row.cache in (None, *caches)]


def _key(row: Result) -> tuple[str, ...]:
    """The cells by which rows are told apart, which may be empty."""
    return tuple(str(getattr(row, name)) for name in OF_CASE)
