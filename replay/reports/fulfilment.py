"""Options of a replay that no row fulfils: modes, directions, dtypes and analyses without results."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from opgrip.cli.command import printable
from opgrip.cli.options import flag_of, from_arguments, words_in
from opgrip.replay.analyses import in_order
from opgrip.replay.cases.selection import BACKWARD, PointOptions, Selection
from opgrip.replay.inputs.input_options import InputOptions
from opgrip.replay.modes import EAGER, ModeOptions, Tuning
from opgrip.replay.results.columns import Columns
from opgrip.replay.results.results import CONTENDED, OK, WRONG, Result
from opgrip.replay.run.energy import EnergyColumns, EnergyOptions
from opgrip.replay.timing.timing_options import TimingOptions
from opgrip.replay.workers.executors import EngineOptions

WITH_RESULTS = (OK, WRONG, CONTENDED)  # statuses of rows with results


@dataclass(frozen=True, slots=True)
class Request:
    words: str  # the option and its value
    is_of: Callable[[Result], bool]
    absence: str = "no row has this value"  # reason to print if no row fulfils the option


def unfulfilled(args: argparse.Namespace, rows: Sequence[Result]) -> list[str]:
    """Return a line for each option that no row fulfils, or a single line if there are rows but no case ran."""
    if not any(row.status in WITH_RESULTS for row in rows):
        return [f"no case ran{_why(rows)}"] if rows else []
    lines = []
    for request in _requests(args):
        own = [row for row in rows if request.is_of(row)]
        if not any(row.status in WITH_RESULTS for row in own):
            lines.append(f"nothing ran with {request.words}{_why(own) or f': {request.absence}'}")
    return lines


def _requests(args: argparse.Namespace) -> Iterator[Request]:
    inputs, points = from_arguments(InputOptions, args), from_arguments(PointOptions, args)
    modes, timing = from_arguments(ModeOptions, args), from_arguments(TimingOptions, args)
    references = (modes.reference,) if modes.reference != EAGER else ()
    columns: dict[str, Iterable[object]] = {
        "mode": (*modes.mode, *references),
        "values": inputs.values,
        "threads": points.threads,
        "batch_scale": points.batch_scale,
        "streams": points.streams,
        "cache": timing.cache,
    }
    for name, values in columns.items():
        for value in values:
            yield Request(f"{flag_of(name)} {value}", partial(_has, name, value))
    if timing.backward:
        yield Request("--backward", lambda row: row.direction == BACKWARD, "no case is a forward call")
    if inputs.dtype is not None:
        absence = "no case has a floating-point tensor that can be converted"
        dtype = inputs.dtype
        yield Request(f"--dtype {dtype}", lambda row: row.dtype == dtype or f"{dtype}[" in row.shapes, absence)
    if from_arguments(Tuning, args).trials:
        yield Request("--tune", lambda row: bool(row.tune))
    if from_arguments(EnergyOptions, args).energy:
        yield Request("--energy", partial(_is_seen, EnergyColumns), "the energy of no row was measured")
    for analysis in in_order():
        words = words_in(analysis.options)
        is_requested = bool(words) and analysis.is_requested(from_arguments(analysis.options, args))
        if is_requested and analysis.columns is not None:
            yield Request(flag_of(words[0]), partial(_is_seen, analysis.columns), "it added nothing to any row")
    selection = from_arguments(Selection, args)
    is_part = selection.top is not None or from_arguments(EngineOptions, args).shard is not None
    if selection.takes_all and not is_part:
        for pattern in selection.op:
            yield Request(f"--op {pattern}", partial(_matches, pattern), "no case matches it")


def _has(column: str, value: object, row: Result) -> bool:
    return bool(getattr(row, column) == value)


def _matches(pattern: str, row: Result) -> bool:
    return fnmatchcase(row.op, pattern)


def _is_seen(columns: type[Columns], row: Result) -> bool:
    return columns.of(row) != columns()


def _why(rows: Sequence[Result]) -> str:
    reasons = Counter(f"{row.error}" if row.error else row.status for row in rows if row.status not in WITH_RESULTS)
    if not reasons:
        return ""
    reason, count = reasons.most_common(1)[0]
    share = "" if len(reasons) == 1 else f" ({count:,} of {reasons.total():,} rows)"
    return f": {printable(reason)}{share}"
