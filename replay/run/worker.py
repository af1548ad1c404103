"""A worker process that measures cases, and both ends of its connection."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from opgrip.cli.command import printable
from opgrip.cli.terminal import shorten
from opgrip.errors import UserError
from opgrip.platform.sandbox import DEVICE_LOST, IDLE, POLL_S, Child, Ended, Heartbeat, receive_request, write_message
from opgrip.replay.cases.cases import Case
from opgrip.replay.operators.devices import DeviceLostError, use_device
from opgrip.replay.operators.memory import limit_memory
from opgrip.replay.results.results import OK, Result
from opgrip.replay.run.measure import CachedRows, measure_cases
from opgrip.replay.run.preparation import prepare
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import Workload, empty_row, empty_rows, load_workload
from opgrip.replay.timing.rounds import Announce

MODULE = "opgrip.replay.run.worker"
RETRIES = 2  # consecutive times that a worker may end without a row and without a case to blame

MOST_LINES, LONGEST_LINE = 20, 200  # maximum number of lines shown of what candidates print, and of characters of each
OF_PROFILER = "was allocated before the profiling started"  # part of a line that torch prints while memory is measured

Lane = Iterator[list[Result] | None]  # rows of one worker, case by case; None while the next are not ready


class Worker:
    """The parent's end of the connection to a worker process for one device; a request starts the process if none runs.

    may_fork : True if this process has not used torch yet
    """

    def __init__(self, workload: Workload, may_fork: bool) -> None:
        self._workload, self._may_fork = workload, may_fork
        self._child: Child | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(lets_end=error is None)

    def close(self, lets_end: bool = False) -> None:
        """End the worker process.

        lets_end : True to wait until a process under a profiler exits, because the profiler writes its report then
        """
        if self._child is not None:
            if lets_end and self._workload.request.profiled:
                self._child.finish()
            if self._workload.request.candidates.candidate:
                _show_printed(self._child.printed_lines())
            self._child.close()
            self._child = None

    def fileno(self) -> int:
        assert self._child is not None, "it was asked"
        return self._child.fileno()

    def ask(self, message: Mapping[str, Any]) -> None:
        if self._child is None:
            workload = self._workload
            self._child = start_child(workload, self._may_fork, partial(serve, workload), MODULE)
        self._child.send(message)

    def receive(self, wait_s: float = POLL_S) -> list[Any] | Ended:
        assert self._child is not None, "it was asked"
        received = self._child.receive(wait_s)
        if isinstance(received, Ended):
            self._child.close()
            self._child = None
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
            self.ask({"cases": list(remaining), "without": list(without), "known": known})
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


def start_child(
    workload: Workload,
    may_fork: bool,
    run: Callable[[int, int, Heartbeat], object],
    module: str,
    others: Mapping[str, Any] | None = None,
) -> Child:
    """Start a process for a workload: a fork of this process that calls `run` if that is safe, else one that runs
    `module`.

    may_fork : True if this process has not used torch yet
    """
    request = workload.request
    if may_fork and not workload.source_cases.has_run_code and workload.device == "cpu" and not request.sandbox:
        return Child(run, timeout_s=request.limits.timeout)
    writable = [folder for folder in (request.timelines,) if folder] if request.sandbox else None
    for folder in writable or ():
        os.makedirs(folder, exist_ok=True)
    return Child(module, {"request": asdict(request), **(others or {})}, request.limits.timeout, writable)


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


def main() -> int:
    request, heartbeat, output = receive_request()
    serve(load_workload(RunRequest.from_plain(request["request"])), 0, output, heartbeat)
    return 0


if __name__ == "__main__":
    sys.exit(main())
