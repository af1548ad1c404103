"""A worker process that measures cases, both ends of its connection, and the distribution of cases over devices."""

from __future__ import annotations

import json
import os
import select
import sys
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from math import ceil
from types import TracebackType
from typing import Any, NoReturn

import torch

from opgrip.cli.command import counted, printable
from opgrip.cli.progress import Reporter
from opgrip.cli.terminal import shorten
from opgrip.errors import UserError
from opgrip.platform.sandbox import DEVICE_LOST, IDLE, POLL_S, Child, Ended, Heartbeat, receive_request, write_message
from opgrip.replay.cases.cases import Case
from opgrip.replay.cases.selection import Variant
from opgrip.replay.modes import find_mode
from opgrip.replay.operators.devices import (
    DeviceLostError,
    check_equal,
    check_present,
    facts_of,
    free_by_driver,
    name_of,
    use_device,
)
from opgrip.replay.operators.memory import limit_memory
from opgrip.replay.results.origins import describe_environment, this_machine
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run.measure import CASES, CachedRows, measure_cases, windows
from opgrip.replay.run.preparation import prepare
from opgrip.replay.run.programs import remove_partial
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import OUT_OF_MEMORY, Workload, empty_row, empty_rows, load_workload
from opgrip.replay.timing.rounds import Announce

MODULE = "opgrip.replay.run.worker"
RETRIES = 2  # consecutive times that a worker may end without a row and without a case to blame

MOST_LINES, LONGEST_LINE = 20, 200  # maximum number of lines shown of what candidates print, and of characters of each
OF_PROFILER = "was allocated before the profiling started"  # part of a line that torch prints while memory is measured

Lane = Iterator[list[Result] | None]  # rows of one worker, case by case; None while the next are not ready


class WorkloadChild(Child):
    """A process for a workload: a fork of this process that calls `run` if that is safe, else one that runs `module`.

    may_fork : True if this process has not used torch yet
    """

    def __init__(
        self,
        workload: Workload,
        may_fork: bool,
        run: Callable[[int, int, Heartbeat], object],
        module: str,
        others: Mapping[str, Any] | None = None,
    ) -> None:
        request = workload.request
        can_fork = not workload.source_cases.has_run_code and workload.device == "cpu" and not request.sandbox
        writable = [folder for folder in (request.timelines,) if folder] if request.sandbox else None
        for folder in writable or ():
            os.makedirs(folder, exist_ok=True)
        about = {"request": asdict(request), **(others or {})}
        super().__init__(run if may_fork and can_fork else module, about, request.limits.timeout, writable)


class Worker(WorkloadChild):
    """The parent's end of the connection to a worker process for one device."""

    def __init__(self, workload: Workload, may_fork: bool) -> None:
        super().__init__(workload, may_fork, partial(serve, workload), MODULE)
        self._workload = workload

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(lets_end=error is None)

    def close(self, lets_end: bool = False) -> None:
        """End the worker process.

        lets_end : True to wait until a process under a profiler exits, because the profiler writes its report then
        """
        if self.is_running:
            if lets_end and self._workload.request.profiled:
                self.finish()
            if self._workload.request.candidates.candidate:
                _show_printed(self.printed_lines())
            super().close()

    def receive(self, wait_s: float = POLL_S) -> list[Any] | Ended:
        received = super().receive(wait_s)
        if isinstance(received, Ended):
            super().close()
        return received

    def measure(self, cases: Sequence[Case], without: list[int], cached_rows: CachedRows) -> Lane:
        """Yield the rows of cases that are measured in the same rounds, or None while no rows are ready.

        without : numbers of cases that must not run as preceding calls of timed cases
        cached_rows : rows of the variants that were compiled before, by case number and row number
        """
        workload = self._workload
        remaining = {case.number: case for case in cases}
        cached = {
            case.number: {
                number: replace(row, device=workload.device) for number, row in cached_rows.get(case.number, {}).items()
            }
            for case in cases
        }
        blameless = 0
        while remaining:
            for case in list(remaining.values()):
                lost = [row for row in cached[case.number].values() if row.status != OK]
                if len(lost) == len(workload.variants(case)):
                    # a case that cannot run needs no process
                    del remaining[case.number]
                    yield [cached[case.number][variant.number] for variant in workload.variants(case)]
            if not remaining:
                return
            known = [[case, row, result.to_plain()] for case in remaining for row, result in cached[case].items()]
            self.send({"cases": list(remaining), "without": list(without), "known": known})
            received: list[Any] | Ended = []
            while not isinstance(received, Ended) and "done" not in (received or [{}])[-1]:
                yield None
                received = self.receive(0)
                for message in [] if isinstance(received, Ended) else received:
                    if "rows" in message:
                        blameless = 0
                        rows = [Result.from_plain(row) for row in message["rows"]]
                        del remaining[rows[0].case]
                        yield rows
            if isinstance(received, Ended) and not self._blame(received, remaining, without, cached):
                blameless += 1
                if blameless > RETRIES:
                    raise UserError("the process that runs the cases cannot continue", received.reason)

    def _blame(
        self, ended: Ended, remaining: Mapping[int, Case], without: list[int], cached: dict[int, dict[int, Result]]
    ) -> bool:
        workload, case = self._workload, remaining.get(ended.item)
        if case is not None and ended.part != IDLE:
            variant = workload.variants(case)[ended.part]
            cached[ended.item][ended.part] = empty_row(case, variant, workload, ended.status, ended.reason)
        elif ended.item in workload.surroundings.cases and ended.item not in without:
            # it ended while the case ran as a preceding call
            without.append(ended.item)
        elif case is not None:
            cached[ended.item] = empty_rows(case, workload, ended.status, ended.reason)
        else:
            return False
        return True


def _show_printed(lines: Sequence[str]) -> None:
    printed = [line for line in lines if OF_PROFILER not in line]
    if printed:
        shown = [f"  {printable(shorten(line, LONGEST_LINE))}" for line in printed[:MOST_LINES]]
        more = [f"  and {len(printed) - MOST_LINES:,} more lines"] if len(printed) > MOST_LINES else []
        print("printed by the candidates:", *shown, *more, sep="\n", file=sys.stderr)


def serve(workload: Workload, source: int, output: int, heartbeat: Heartbeat) -> None:
    heartbeat.rest()
    # the last line of a dying process must be the reason
    warnings.simplefilter("ignore")
    if workload.request.points.pin:
        os.sched_setaffinity(0, workload.request.points.pin)
    use_device(workload.device)
    limit = limit_memory(workload.request.limits.memory_limit, workload.device)
    limits = replace(workload.request.limits, memory_limit=limit)
    limited = replace(workload.with_request(limits=limits), memory=True)
    process, announce = os.getpid(), _guarded(heartbeat.enter)
    cases = {case.number: case for case in workload.cases}
    try:
        for line in os.fdopen(source, "rb"):
            request = json.loads(line)
            if "make" in request:
                number, row = request["make"]
                rows_of_cases: Iterable[list[Result]] = [
                    [item.row.freeze() for item in prepare(cases[number], limited, announce, only=row)]
                ]
            else:
                rows_of_cases = measure_cases(
                    [cases[number] for number in request["cases"]],
                    limited,
                    workload.surroundings,
                    announce,
                    request["without"],
                    by_case(request["known"]),
                )
            for rows in rows_of_cases:
                _end_copy(process)
                heartbeat.rest()
                write_message(output, {"rows": [row.to_plain() for row in rows]})
            heartbeat.rest()
            # this process is killed later, without a flush
            sys.stdout.flush()
            write_message(output, {"done": True})
    except DeviceLostError as error:
        end_without_device(error)


def _guarded(announce: Announce) -> Announce:
    process = os.getpid()
    try:
        folder = os.getcwd()
    except OSError:
        folder = None

    def announce_here(number: int, row: int) -> None:
        _end_copy(process)
        if folder is not None:
            with suppress(OSError):
                os.chdir(folder)
        announce(number, row)

    return announce_here


def _end_copy(process: int) -> None:
    # a fork that a case's code made would send all rows a second time
    if os.getpid() != process:
        os._exit(0)


def by_case(records: Collection[tuple[int, int, dict[str, Any]]]) -> dict[int, dict[int, Result]]:
    rows_by_case: dict[int, dict[int, Result]] = {}
    for number, row, result in records:
        rows_by_case.setdefault(number, {})[row] = Result.from_plain(result)
    return rows_by_case


def end_without_device(error: DeviceLostError) -> NoReturn:
    print(error, file=sys.stderr, flush=True)
    os._exit(DEVICE_LOST)


class LocalExecutor:
    runs_here = True

    def check(self, workload: Workload) -> None:
        for name in workload.devices:
            check_present(name)
        check_equal(workload.devices)

    def machine_kind(self, workload: Workload) -> str:
        return this_machine("cpu").kind

    def about(self, workload: Workload) -> dict[str, Any]:
        """Return facts about the device and this machine for the header; this initializes the device."""
        device = workload.device
        return {"device": name_of(device), "environment": describe_environment(device), **facts_of(device)}

    def compile(self, workload: Workload, done: Collection[int], reporter: Reporter, may_fork: bool) -> CachedRows:
        for device in workload.devices:
            workload.request.energy.check(device)
        # without a store, the process that times a row could not load what another one compiled
        ahead = rows_ahead(workload, done) if workload.request.store is not None else []
        if not ahead:
            return {}
        rows: dict[int, dict[int, Result]] = {}
        doing = f"compiling {counted(len(ahead), 'row')} of {counted(len(workload.cases) - len(done), 'case')}"
        with reporter.doing(doing, len(ahead)) as advance:
            try:
                dealt = DealtWindows(workload, done)
                for device in workload.devices:
                    # compile for the device that measures the rows: compilers store programs by device
                    numbers = {case.number for case in dealt.dealt_to(device)}
                    own, own_rows = workload.on(device), [row for row in ahead if row[0].number in numbers]
                    for part, jobs in in_parts(own_rows, own, workload.request.limits.compilers):
                        for number, case_rows in make_ahead(own, part, jobs, may_fork, advance).items():
                            rows.setdefault(number, {}).update(case_rows)
            except KeyboardInterrupt:
                reporter.say("interrupted; programs compiled so far are kept for later replays")
                raise
        return rows

    def run(
        self, workload: Workload, done: Collection[int], cached_rows: CachedRows, may_fork: bool
    ) -> Iterator[list[Result]]:
        return run_cases(workload, done, may_fork, cached_rows)


def main() -> int:
    request, heartbeat, output = receive_request()
    serve(load_workload(RunRequest.from_plain(request["request"])), 0, output, heartbeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())


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
        busy: dict[Child, Row] = {}
        while remaining_rows or busy:
            while remaining_rows and idle:
                worker, (case, variant) = idle.pop(), remaining_rows.popleft()
                worker.send({"make": [case.number, variant.number]})
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
