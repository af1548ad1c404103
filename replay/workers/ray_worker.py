"""The Ray actor of a worker, which measures groups of cases in the same way as a replay on the user's machine."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from opgrip.errors import UserError

if TYPE_CHECKING:
    from opgrip.replay.results.results import Result
    from opgrip.replay.run.workload import Workload
    from opgrip.replay.workers.worker import Worker

# environment variable that Ray sets to the number of an actor's processors; a replay restores the user's value
THREADS = "OMP_NUM_THREADS"


LOSSES = 3  # number of lost workers after which a case is reported as failed


@dataclass(frozen=True, slots=True)
class RayTask:
    """Cases that one worker measures in the same rounds.

    cases : case numbers
    home : node that has their compiled programs; empty for any
    losses : number of workers that ended unexpectedly while they ran these cases
    """

    cases: Sequence[int]
    home: str = ""
    losses: int = 0

    def after_loss(self) -> list[RayTask]:
        """Return the tasks to run after a worker ended; from the second time on, a task for each case, to find the one
        that ends workers.
        """
        lost = replace(self, losses=self.losses + 1)
        if lost.losses < LOSSES - 1 or len(self.cases) == 1:
            return [lost]
        return [replace(lost, cases=[case], losses=LOSSES - 2) for case in self.cases]


WAIT_S, POLL_S = 60.0, 0.2  # times in seconds: to wait for processors of other workers, and between two attempts


class Processors:
    """Processors to which this process and its children are pinned, and which no other worker of this user uses.

    Each processor has a locked file, which the system unlocks when this process ends.

    count : number of processors; 0 to pin none
    wait_s : time in seconds to wait for processors that other workers use
    numbers : numbers of the processors, ascending
    Raises `UserError` if too few processors are free.
    """

    def __init__(self, count: int, wait_s: float = WAIT_S) -> None:
        self._files: list[int] = []
        self.numbers: Sequence[int] = ()
        if not count:
            return
        usable = sorted(os.sched_getaffinity(0))
        if count > len(usable):
            raise UserError(
                f"this machine has {len(usable)} processors, not {count}", f"set --processors to at most {len(usable)}"
            )
        folder = Path(tempfile.gettempdir()) / f"opgrip-processors-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        end = monotonic() + wait_s
        while not self._take(folder, usable, count):
            if monotonic() > end:
                raise UserError(
                    f"fewer than {count} processors are free, because other workers use them",
                    "set --processors to a smaller number",
                )
            sleep(POLL_S)
        os.sched_setaffinity(0, self.numbers)

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _take(self, folder: Path, usable: Sequence[int], count: int) -> bool:
        """Lock `count` of the usable processors and return True; if not enough are free, lock none and return False."""
        numbers = []
        for number in usable:
            file = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._files.append(file)
                numbers.append(number)
                if len(numbers) == count:
                    self.numbers = numbers
                    return True
                continue
            os.close(file)
        self.close()
        return False


class RayWorker:
    """A worker process with one device, or with processors to itself.

    processors : number of processors to pin to; 0 for no pinning
    threads : the user's value of `OMP_NUM_THREADS`
    slots : number of workers on this machine, which share its memory
    """

    def __init__(self, processors: int, threads: str | None, slots: int) -> None:
        self._slots = slots
        os.environ.pop(THREADS, None)
        if threads is not None:
            os.environ[THREADS] = threads
        self._problem: list[str] | None = None
        try:
            self._processors = Processors(processors)
        except UserError as error:
            self._problem = [error.problem, error.hint]
        self._folder = tempfile.TemporaryDirectory(prefix="opgrip-")
        self._replay: tuple[int, Workload] | None = None
        self._worker: tuple[int, Worker] | None = None
        self._without: list[int] = []
        # path of the trace's copy, and the user's name of the trace
        self._copied = "-", "-"

    def describe(self, device: str, versions: Mapping[str, str]) -> dict[str, Any]:
        """Return facts about this machine for the header of results, or the reason why it cannot run cases.

        versions : versions of packages on the user's machine, which must be the same here
        """
        from dataclasses import asdict

        import torch

        from opgrip.replay.operators.devices import check_present, facts_of, name_of
        from opgrip.replay.results.origins import describe_environment, this_machine

        try:
            check_present(device)
        except UserError as error:
            self._problem = self._problem or [error.problem, error.hint]
        own = {"torch": str(torch.__version__), "opgrip": metadata.version("opgrip")}
        for name, version in versions.items():
            if own[name] != version:
                problem = f"a machine of the cluster has {name} {own[name]}, and this one {version}"
                self._problem = self._problem or [problem, "install the same"]
        if self._problem is not None:
            return {"problem": self._problem}
        about = {"device": name_of(device), "environment": describe_environment(device), **facts_of(device)}
        return {"machine": asdict(this_machine(device)), "about": about, "pid": os.getpid()}

    def close(self) -> None:
        self._end_process()
        self._folder.cleanup()

    def compile(self, number: int, bundle: Sequence[Any], cases: Sequence[int], jobs: int | None) -> Iterator[bytes]:
        """Compile the programs of all rows, and yield a message with the rows of each case.

        number : number of the workload in the user's command; its trace is loaded once
        bundle : list with a reference to the request and its files
        jobs : number of processes that compile; None for one per processor
        """
        yield from _encoded(self._compile(number, bundle, cases, jobs))

    def measure(
        self, number: int, turn: int, bundle: Sequence[Any], cases: Sequence[int], cached: Sequence[Any]
    ) -> Iterator[bytes]:
        """Yield a message with the rows of each case, as soon as they are measured.

        number : number of the workload in the user's command; its trace is loaded once
        turn : number of the repeat; each repeat has a new process
        bundle : list with a reference to the request and its files
        cached : (case number, row number, row) of each compiled program
        """
        yield from _encoded(self._measure(number, turn, bundle, cases, cached))

    def _compile(self, number: int, bundle: Sequence[Any], cases: Sequence[int], jobs: int | None) -> Iterator[Any]:
        from opgrip.replay.workers.scheduling import in_parts, make_ahead, rows_ahead

        workload = self._load(number, bundle)
        ahead = rows_ahead(workload, {case.number for case in workload.cases} - {*cases})
        rows: dict[int, dict[int, Any]] = {case: {} for case in cases}
        for part, most in in_parts(ahead, workload, jobs or len(os.sched_getaffinity(0))):
            for case, results in make_ahead(workload, part, most).items():
                rows[case].update(
                    {variant: self._naming_own_trace(result).to_plain() for variant, result in results.items()}
                )
        yield from ([case, list(results.items())] for case, results in rows.items())

    def _measure(
        self, number: int, turn: int, bundle: Sequence[Any], cases: Sequence[int], cached: Sequence[Any]
    ) -> Iterator[Any]:
        from opgrip.replay.results.results import Result
        from opgrip.replay.workers.scheduling import interleaved

        workload = self._load(number, bundle)
        cached_rows: dict[int, dict[int, Result]] = {}
        for case, variant, plain in cached:
            cached_rows.setdefault(case, {})[variant] = Result.from_plain(plain)
        worker, by_number = self._worker_of(turn, workload), {case.number: case for case in workload.cases}
        window = [by_number[case] for case in cases]
        for rows in interleaved({worker: worker.measure(window, self._without, cached_rows)}):
            yield [self._naming_own_trace(row).to_plain() for row in rows]

    def _naming_own_trace(self, row: Result) -> Result:
        """Return a row whose error message names the user's trace instead of this machine's copy of it."""
        return row if row.error is None else replace(row, error=row.error.replace(*self._copied))

    def _worker_of(self, turn: int, workload: Workload) -> Worker:
        """Return the process that measures the cases; it is the same for all tasks of a repeat."""
        from opgrip.replay.workers.worker import Worker

        if self._worker is None or self._worker[0] != turn:
            self._end_process()
            self._worker = turn, Worker(workload, may_fork=False)
        return self._worker[1]

    def _end_process(self) -> None:
        if self._worker is not None:
            self._worker[1].close()
            self._worker = None

    def _load(self, number: int, bundle: Sequence[Any]) -> Workload:
        """Return the workload of a replay, loaded on this machine with this machine's memory limits."""
        if self._replay is not None and self._replay[0] == number:
            return self._replay[1]
        import ray

        from opgrip.platform.machine import available_memory, cache_folder
        from opgrip.replay.operators.devices import is_accelerator
        from opgrip.replay.run.request import RunRequest
        from opgrip.replay.run.workload import load_workload

        self._end_process()
        self._replay, self._without = None, []
        shipped: Mapping[str, Any] = ray.get(bundle[0])
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(prefix="opgrip-")
        for name, content in shipped["files"].items():
            (Path(self._folder.name) / name).write_bytes(content)
        request = RunRequest.from_plain(json.loads(shipped["request"]))
        if shipped["files"]:
            copy = str(Path(self._folder.name) / next(iter(shipped["files"])))
            self._copied = copy, request.trace
            request = replace(request, trace=copy)
        workload = load_workload(replace(request, store=None if request.store is None else str(cache_folder())))
        limit = request.limits.memory_limit
        if limit is None and not is_accelerator(workload.device):
            free = available_memory(workload.device)
            limit = None if free is None else free // self._slots
        workload = workload.with_request(limits=replace(request.limits, memory_limit=limit))
        self._replay = number, workload
        return workload


def _encoded(messages: Iterator[Any]) -> Iterator[bytes]:
    """Yield messages as JSON, which can be read without executing code; a `UserError` becomes the last message."""
    try:
        for message in messages:
            yield json.dumps(message).encode()
    except UserError as error:
        yield json.dumps({"problem": [error.problem, error.hint]}).encode()
