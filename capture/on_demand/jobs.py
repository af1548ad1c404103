"""Simultaneous recording of all ranks of a job, which begin with the same step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from time import monotonic, sleep
from typing import Any

from opgrip.capture.on_demand.client import RecordableProcess, converse, processes, without_workers
from opgrip.capture.on_demand.protocol import ARMED, DONE, RECORD, STOP, TELL, WAITING, lines_of
from opgrip.cli.command import printable
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError, one_line

LOOK_S = 0.3  # interval in seconds between two checks of the job's progress
AHEAD_S = 0.5  # time in seconds after which the common first step should begin
# maximum number of attempts; if a rank had already passed the first step, the next one leaves twice as much time
MOST_TRIES = 6
END_S = 10.0  # time in seconds for writing recordings that Ctrl-C has ended
MOST_WORKERS = 4  # maximum number of process ids of workers that are printed


def choose_ranks(items: Sequence[RecordableProcess], rank: int | None, reporter: Reporter) -> list[RecordableProcess]:
    """Return the processes on this machine to record together: all ranks of the job of `items`, or one rank.

    Workers such as data loaders are not ranks; a worker chosen by its process id is recorded without the ranks.

    items : processes that the user named
    rank : number of the only rank to record, or None

    Raises UserError: the rank does not run on this machine.
    """
    job = items[0].job
    if job is None:
        if rank is not None:
            raise UserError(f"process {items[0].pid} is not a rank of a job", "leave out --rank")
        _report_workers(items, reporter)
        return list(items)
    ranks = [item for item in without_workers(processes()) if item.job == job]
    members = sorted(ranks, key=lambda item: item.rank or 0)
    if rank is None and len(items) == 1 and items[0].pid not in [item.pid for item in members]:
        return list(items)
    if rank is not None:
        chosen = [item for item in members if item.rank == rank]
        if not chosen:
            numbers = ", ".join(str(item.rank) for item in members)
            raise UserError(f"rank {rank} does not run on this machine", f"these ranks do: {numbers}")
        return chosen
    size = items[0].about.get("world_size") or len(members)
    if len(members) < size:
        reporter.say(
            f"{len(members)} of the {size} ranks run on this machine: trigger the others on their machines, with "
            "the --at printed below"
        )
    return members


def _report_workers(items: Sequence[RecordableProcess], reporter: Reporter) -> None:
    for item in items:
        if item.workers:
            numbers = [str(pid) for pid in item.workers[:MOST_WORKERS]] + ["..."] * (len(item.workers) > MOST_WORKERS)
            reporter.say(
                f"process {item.pid} has started others with the same name, which are not recorded: to "
                f"record one, give its PID: {', '.join(numbers)}"
            )


def record_together(
    chosen: Sequence[RecordableProcess], request: Mapping[str, Any], reporter: Reporter
) -> list[dict[str, Any]]:
    """Record processes at the same time, and return the result of each, as `Agent.finish` returns it.

    Ranks of a job begin with the same step.

    request : fields of the request to record

    Raises UserError: a process refuses the request.
    """
    if len(chosen) == 1 or request.get("begins_at") is not None:
        return _Round(chosen, request, reporter).run()
    distance_s = AHEAD_S
    for _ in range(MOST_TRIES):
        begins_at = _place_ahead(chosen, distance_s)
        if begins_at is None:
            reporter.say("the ranks of the job have no common step count: each begins with its next step")
            return _Round(chosen, request, reporter).run()
        results = _Round(chosen, {**request, "begins_at": begins_at}, reporter).run()
        if results:
            return results
        distance_s *= 2
    raise UserError(
        "the steps are so short that the request does not reach all ranks in time", "name a later step with --at"
    )


def _place_ahead(chosen: Sequence[RecordableProcess], distance_s: float) -> int | None:
    """Return the number of a step that no rank in `chosen` reaches within `distance_s` seconds, or None if a rank
    counts no steps.
    """
    first, since_s = _positions(chosen), monotonic()
    sleep(LOOK_S)
    last, elapsed_s = _positions(chosen), monotonic() - since_s
    if first is None or last is None:
        return None
    pace = max(after - before for before, after in zip(first, last, strict=True))
    return max(last) + 1 + int(pace * distance_s / elapsed_s)


def _positions(chosen: Sequence[RecordableProcess]) -> list[int] | None:
    """Return the number of the current step of each process in `chosen`; None if one of them counts no steps."""
    positions = [next(iter(converse(item, TELL)), {}).get("position") for item in chosen]
    return None if None in positions else [int(position) for position in positions if position is not None]


class _Round:
    """One attempt to record several processes so that they begin with the same step."""

    def __init__(self, chosen: Sequence[RecordableProcess], request: Mapping[str, Any], reporter: Reporter) -> None:
        self._chosen, self._request, self._reporter = chosen, request, reporter
        self._answers: queue.SimpleQueue[tuple[RecordableProcess, Any]] = queue.SimpleQueue()
        self._results: dict[int, dict[str, Any]] = {}
        self._errors: list[UserError] = []
        self._is_late = False

    def run(self) -> list[dict[str, Any]]:
        """Return the result of each recording, as `Agent.finish` returns it, or an empty list if the attempt failed.

        The attempt fails if a rank has already passed the first step when the request reaches it.
        """
        for item in self._chosen:
            threading.Thread(target=self._ask, args=(item,), daemon=True).start()
        try:
            self._handle_answers()
        except KeyboardInterrupt:
            self._end_all()
            raise
        if self._errors:
            raise self._errors[0]
        if self._is_late:
            return []
        self._compare(list(self._results.values()))
        return [self._results[item.pid] for item in self._chosen]

    def _handle_answers(self, until_s: float = inf) -> None:
        """Handle the answers of all processes until each is done, or until the time `until_s` by `monotonic`."""
        while len(self._results) + len(self._errors) < len(self._chosen) and (left_s := until_s - monotonic()) > 0:
            try:
                item, answer = self._answers.get(timeout=None if left_s == inf else left_s)
            except queue.Empty:
                return
            if isinstance(answer, UserError):
                self._errors.append(answer)
                self._stop_all(item)
            elif answer.get("answer") == ARMED:
                self._check_position(item, answer)
            elif answer.get("answer") == WAITING:
                self._reporter.say(f"process {item.pid}: no step has begun yet: {printable(answer.get('why', ''))}")
            elif answer.get("answer") == DONE:
                self._results[item.pid] = answer
                # a process that finished before another was found to be late has left a file
                if not self._is_late or answer.get("file"):
                    self._report(item, answer)

    def _end_all(self) -> None:
        """Make each process end its recording, and handle its answer."""
        for item in self._chosen:
            _stop(item, discard=False)
        self._handle_answers(monotonic() + END_S)

    def _ask(self, item: RecordableProcess) -> None:
        answer: Any = {}
        file = ""
        try:
            for answer in converse(item, RECORD, **self._request):
                if answer.get("answer") == ARMED:
                    file = printable(answer.get("file", ""))
                if answer.get("answer") in (ARMED, WAITING):
                    self._answers.put((item, answer))
        except UserError as error:
            answer = error
        except Exception as error:
            answer = UserError(f"process {item.pid} cannot be reached", one_line(error))
        if isinstance(answer, dict) and answer.get("answer") != DONE:
            hint = (
                f"its calls up to then are in {file}, or in the .part file next to it: read it with --partial"
                if file
                else ""
            )
            answer = UserError(f"process {item.pid} ended before its recording did", hint)
        self._answers.put((item, answer))

    def _check_position(self, item: RecordableProcess, answer: Mapping[str, Any]) -> None:
        """Handle a process's answer that its recording can begin: stop all recordings if the process has already passed
        the first step, else tell the user that it waits.
        """
        begins_at, position = self._request.get("begins_at"), answer.get("position")
        if self._is_late or self._errors:
            # it was ready only after the others had been stopped
            _stop(item)
        elif begins_at is None:
            self._reporter.say(f"process {item.pid} waits for a step")
        elif position is not None and position >= begins_at:
            self._is_late = True
            self._stop_all(None)
        else:
            rank = "" if item.rank is None else f" (rank {item.rank})"
            self._reporter.say(f"process {item.pid}{rank} waits for step {begins_at} (--at {begins_at})")

    def _stop_all(self, but: RecordableProcess | None) -> None:
        for item in self._chosen:
            if item is not but:
                _stop(item)

    def _report(self, item: RecordableProcess, result: Mapping[str, Any]) -> None:
        for line in lines_of(result):
            self._reporter.say(f"process {item.pid}: {printable(line)}")

    def _compare(self, results: Sequence[Mapping[str, Any]]) -> None:
        places = {result.get("began_at") for result in results if result.get("file")}
        if len(places) > 1 and self._request.get("begins_at") is not None:
            self._reporter.say(
                f"the ranks began with different steps: at {', '.join(map(str, sorted(places, key=str)))}"
            )


def _stop(item: RecordableProcess, discard: bool = True) -> None:
    """End the recording of a process, and with `discard` write no file.

    A process that does not answer either has no recording, or notices that its client is gone.
    """
    with suppress(UserError):
        list(converse(item, STOP, discard=discard))
