"""Makes the rows ready that take a compiler, several at a time, before any is timed.

What the compilers made is kept on disk, so that the process that times the rows does not compile them again; and one
that hangs or crashes has cost its row by then, not a measurement.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ExitStack

import torch

from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.variants import Variant
from opgrip.replay.modes import find_mode
from opgrip.replay.operators.devices import free_by_driver
from opgrip.replay.programs import remove_partial
from opgrip.replay.results.results import Result
from opgrip.replay.run.failures import OUT_OF_MEMORY
from opgrip.replay.run.preparation import empty_row
from opgrip.replay.run.settings import Settings
from opgrip.replay.workers.connection import Connection
from opgrip.replay.workers.job import Job, Loaded
from opgrip.replay.workers.worker_processes import POLL_S, Ended

Row = tuple[Case, Variant]

MOST_BESIDE, COMPILER_BYTES = 4, 3 << 29
"""Processes that compile on one accelerator at most, and bytes of its memory for each: its context, its libraries, and
a call's tensors."""


def rows_ahead(loaded: Loaded, done: Collection[int] = ()) -> list[Row]:
    """The rows that take a compiler, of the cases that are not done."""
    settings = loaded.settings
    slow = {name for name in settings.modes.all_names if find_mode(name)[0].ahead}
    cases = [case for case in loaded.cases if case.number not in done and case.signature.raised is None]
    return [(case, way) for case in cases for way in settings.ways(case) if way.mode in slow]


def in_parts(rows: Collection[Row], settings: Settings, jobs: int) -> list[tuple[list[Row], int]]:
    """Rows that are made side by side, and by how many processes.

    All share one accelerator: its memory, and its time, which those that autotune measure. So these go one by one.

    Parameters
    ----------
    jobs : processes at most
    """
    if torch.device(settings.device).type == "cpu":
        return [(list(rows), jobs)]
    free_bytes = settings.limits.memory_limit or free_by_driver(settings.device)
    beside = min(jobs, MOST_BESIDE, jobs if free_bytes is None else max(1, free_bytes // COMPILER_BYTES))
    alone = [row for row in rows if _autotunes(row, settings)]
    others = [row for row in rows if not _autotunes(row, settings)]
    return [(part, count) for part, count in ((others, beside), (alone, 1)) if part]


def _autotunes(row: Row, settings: Settings) -> bool:
    mode, _ = find_mode(row[1].mode)
    return mode.autotunes or bool(mode.tuners and settings.tuning.trials)


def make_ahead(
    job: Job,
    loaded: Loaded,
    rows: Collection[Row],
    jobs: int,
    timeout_s: float | None = None,
    may_fork: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> dict[int, dict[int, Result]]:
    """What came of making rows ready, by the numbers of case and row: `ok` with the time of its first call, or why not.

    Nothing of a row that ran out of memory, which processes beside it took: it is made again where it is timed.

    Parameters
    ----------
    jobs : processes that do so side by side
    advance : is called after each row
    """
    rows_by_case: dict[int, dict[int, Result]] = {}
    remaining_rows = deque(rows)
    with ExitStack() as stack:
        stack.callback(remove_partial, loaded.settings.store)
        idle = [
            stack.enter_context(Connection(job, loaded, timeout_s, may_fork))
            for _ in range(min(jobs, len(remaining_rows)))
        ]
        busy: dict[Connection, Row] = {}
        while remaining_rows or busy:
            while remaining_rows and idle:
                process, (case, way) = idle.pop(), remaining_rows.popleft()
                process.ask({"make": [case.number, way.number]})
                busy[process] = case, way
            ready, _, _ = select.select(list(busy), [], [], POLL_S)
            for process in ready or list(busy):
                case, way = busy[process]
                heard = process.hear(0)
                if isinstance(heard, Ended):
                    result = empty_row(case, way, loaded.settings, heard.status, heard.reason)
                    rows_by_case.setdefault(case.number, {})[way.number] = result
                for message in [] if isinstance(heard, Ended) else heard:
                    for result in map(Result.from_plain, message.get("rows", ())):
                        if not (result.error or "").startswith(OUT_OF_MEMORY):
                            rows_by_case.setdefault(case.number, {})[way.number] = result
                if isinstance(heard, Ended) or any("done" in message for message in heard):
                    del busy[process]
                    idle.append(process)
                    advance()
    return rows_by_case
