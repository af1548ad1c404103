"""Runs cases in a process of their own: one that crashes, hangs or wants too much memory costs its row alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from opgrip.errors import UserError
from opgrip.replay.cases.cases import Case
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run.measure import CachedRows
from opgrip.replay.run.preparation import empty_row, empty_rows
from opgrip.replay.workers.connection import Connection
from opgrip.replay.workers.job import Job, Loaded
from opgrip.replay.workers.spread import Lane, Windows, interleaved
from opgrip.replay.workers.watch import NOTHING
from opgrip.replay.workers.worker_processes import Ended

RETRIES = 2
"""Times in succession that a process may end without a row where no case is to blame."""


def supervise(
    job: Job,
    loaded: Loaded,
    timeout_s: float | None = None,
    done: Collection[int] = (),
    may_fork: bool = False,
    cached_rows: CachedRows | None = None,
) -> Iterator[list[Result]]:
    """The rows of each case, as soon as all of its runs are done; of several devices each has a process.

    Parameters
    ----------
    timeout_s : of one run, or of making a case ready
    done : numbers of cases that are left out
    may_fork : whether this process has run nothing of torch yet, and forks of it can
    cached_rows : rows of which it is known what came of making them ready
    """
    without: list[int] = []
    windows = Windows(loaded, done)
    with ExitStack() as stack:
        lanes = {}
        for device in loaded.devices:
            there = loaded.on(device)
            process = stack.enter_context(Connection(job.on(device), there, timeout_s, may_fork))
            lanes[process] = _lane(process, windows.take(device), without, there, cached_rows or {})
        yield from interleaved(lanes)


def _lane(
    process: Connection, windows: Iterator[list[Case]], without: list[int], loaded: Loaded, cached_rows: CachedRows
) -> Lane:
    for window in windows:
        yield from run_window(process, window, without, loaded, cached_rows)


def run_window(
    process: Connection, cases: Sequence[Case], without: list[int], loaded: Loaded, cached_rows: CachedRows
) -> Lane:
    """The rows of cases that are measured side by side; one that ends the process is left out, and it starts again.

    Parameters
    ----------
    without : numbers of cases that are not run before others, to which those are added that end the process there
    """
    device = loaded.settings.device
    remaining_cases = {case.number: case for case in cases}
    cached_by_case = {
        case.number: {row: replace(result, device=device) for row, result in cached_rows.get(case.number, {}).items()}
        for case in cases
    }
    blameless = 0
    while remaining_cases:
        for case in list(remaining_cases.values()):
            rows = [cached_by_case[case.number].get(way.number) for way in loaded.settings.ways(case)]
            lost_rows = [row for row in rows if row is not None and row.status != OK]
            if len(lost_rows) == len(rows):
                # no process has to start for what cannot run
                del remaining_cases[case.number]
                yield lost_rows
        if not remaining_cases:
            return
        ended = None
        for heard in _run(process, list(remaining_cases), without, cached_by_case):
            if isinstance(heard, Ended):
                ended = heard
            else:
                if heard is not None:
                    blameless = 0
                    del remaining_cases[heard[0].case]
                yield heard
        if ended is None:
            continue
        at_fault = remaining_cases.get(ended.case)
        if at_fault is not None and ended.row != NOTHING:
            way = loaded.settings.ways(at_fault)[ended.row]
            cached_by_case[ended.case][ended.row] = empty_row(
                at_fault, way, loaded.settings, ended.status, ended.reason
            )
        elif ended.case in loaded.surroundings.cases and ended.case not in without:
            # it ended where it ran before another
            without.append(ended.case)
        elif at_fault is not None:
            cached_by_case[ended.case] = empty_rows(at_fault, loaded.settings, ended.status, ended.reason)
        else:
            blameless += 1
            if blameless > RETRIES:
                raise UserError("the process that runs the cases cannot go on", ended.reason)


def _run(
    process: Connection, numbers: Sequence[int], without: Sequence[int], cached_rows: CachedRows
) -> Iterator[list[Result] | Ended | None]:
    """The rows of each of these cases as they come, None before it is heard; last how the process ended, if it did."""
    records = [[number, row, result.to_plain()] for number in numbers for row, result in cached_rows[number].items()]
    process.ask({"cases": numbers, "without": list(without), "known": records})
    while True:
        yield None
        heard = process.hear(0)
        if isinstance(heard, Ended):
            yield heard
            return
        for message in heard:
            if "rows" in message:
                yield [Result.from_plain(row) for row in message["rows"]]
        if any("done" in message for message in heard):
            return
