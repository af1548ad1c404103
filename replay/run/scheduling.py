"""Distribution of cases over the devices of this machine."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from math import ceil

import torch

from opgrip.platform.sandbox import POLL_S, Ended
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.selection import Variant
from opgrip.replay.modes import find_mode
from opgrip.replay.operators.devices import free_by_driver
from opgrip.replay.results.results import Result
from opgrip.replay.run.measure import CASES, CachedRows, windows
from opgrip.replay.run.programs import remove_partial
from opgrip.replay.run.worker import Lane, Worker
from opgrip.replay.run.workload import OUT_OF_MEMORY, Workload, empty_row

Row = tuple[Case, Variant]

# maximum processes that compile on one accelerator, and bytes of its memory for each: its context, its libraries, and
# the tensors of a call
MOST_COMPILERS, COMPILER_BYTES = 4, 3 << 29
# number of windows (groups of cases) per device if there are few cases; with fewer, devices would idle at the end
PARTS = 4


def rows_ahead(workload: Workload, done: Collection[int] = ()) -> list[Row]:
    """Return the rows, as (case, variant), whose mode needs a compiler, without those of the case numbers in `done`."""
    slow = {name for name in workload.request.modes.all_names if find_mode(name)[0].ahead}
    cases = [case for case in workload.cases if case.number not in done and case.signature.raised is None]
    return [(case, variant) for case in cases for variant in workload.variants(case) if variant.mode in slow]


def in_parts(rows: Collection[Row], workload: Workload, jobs: int) -> list[tuple[list[Row], int]]:
    """Split rows into parts that are compiled one after the other, each with its number of processes."""
    if torch.device(workload.device).type == "cpu":
        return [(list(rows), jobs)]
    free_bytes = workload.request.limits.memory_limit or free_by_driver(workload.device)
    together = min(jobs, MOST_COMPILERS, jobs if free_bytes is None else max(1, free_bytes // COMPILER_BYTES))
    tuned = [row for row in rows if _autotunes(row, workload)]
    others = [row for row in rows if not _autotunes(row, workload)]
    return [(part, count) for part, count in ((others, together), (tuned, 1)) if part]


def _autotunes(row: Row, workload: Workload) -> bool:
    name = row[1].mode
    return find_mode(name)[0].autotunes or bool(workload.request.tuning.of(name).trials)


def make_ahead(
    workload: Workload,
    rows: Collection[Row],
    jobs: int,
    may_fork: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> dict[int, dict[int, Result]]:
    """Compile the functions that the given rows will time; return these rows by case number and row number."""
    rows_by_case: dict[int, dict[int, Result]] = {}
    remaining_rows = deque(rows)
    with ExitStack() as stack:
        stack.callback(remove_partial, workload.request.store)
        idle = [stack.enter_context(Worker(workload, may_fork)) for _ in range(min(jobs, len(remaining_rows)))]
        busy: dict[Worker, Row] = {}
        while remaining_rows or busy:
            while remaining_rows and idle:
                worker, (case, variant) = idle.pop(), remaining_rows.popleft()
                worker.ask({"make": [case.number, variant.number]})
                busy[worker] = case, variant
            ready, _, _ = select.select(list(busy), [], [], POLL_S)
            for worker in ready or list(busy):
                case, variant = busy[worker]
                received = worker.receive(0)
                if isinstance(received, Ended):
                    result = empty_row(case, variant, workload, received.status, received.reason)
                    rows_by_case.setdefault(case.number, {})[variant.number] = result
                for message in [] if isinstance(received, Ended) else received:
                    for result in map(Result.from_plain, message.get("rows", ())):
                        if not (result.error or "").startswith(OUT_OF_MEMORY):
                            rows_by_case.setdefault(case.number, {})[variant.number] = result
                if isinstance(received, Ended) or any("done" in message for message in received):
                    del busy[worker]
                    idle.append(worker)
                    advance()
    return rows_by_case


class DealtWindows:
    def __init__(self, workload: Workload, done: Collection[int]) -> None:
        devices = workload.devices
        cases = sorted((case for case in workload.cases if case.number not in done), key=workload.surroundings.first)
        most = CASES if len(devices) == 1 else min(CASES, ceil(len(cases) / (PARTS * len(devices))))
        self._windows: dict[str, deque[list[Case]]] = {device: deque() for device in devices}
        for index, window in enumerate(windows(cases, workload, most)):
            self._windows[devices[index % len(devices)]].append(window)

    def dealt_to(self, device: str) -> list[Case]:
        return [case for window in self._windows[device] for case in window]

    def take(self, device: str) -> Iterator[list[Case]]:
        own = self._windows[device]
        while any(self._windows.values()):
            yield own.popleft() if own else max(self._windows.values(), key=len).pop()


def run_cases(
    workload: Workload, done: Collection[int] = (), may_fork: bool = False, cached_rows: CachedRows | None = None
) -> Iterator[list[Result]]:
    """Return an iterator that yields the rows of each case when it is done.

    cached_rows : rows of the variants that were compiled before, by case number and row number
    """
    without: list[int] = []
    dealt = DealtWindows(workload, done)
    lanes: dict[Worker, Lane] = {}
    for device in workload.devices:
        worker = Worker(workload.on(device), may_fork)
        measure = partial(worker.measure, without=without, cached_rows=cached_rows or {})
        lanes[worker] = chain.from_iterable(map(measure, dealt.take(device)))
    return interleaved(lanes, ends_workers=True)


def interleaved(lanes: Mapping[Worker, Lane], ends_workers: bool = False) -> Iterator[list[Result]]:
    remaining = dict(lanes)
    with ExitStack() as stack:
        for worker in lanes if ends_workers else ():
            stack.enter_context(worker)
        while remaining:
            for worker, lane in list(remaining.items()):
                for rows in lane:
                    if rows is None:
                        break
                    yield rows
                else:
                    del remaining[worker]
            if remaining:
                select.select(list(remaining), [], [], POLL_S)
