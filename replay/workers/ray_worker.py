"""The Ray actor of a worker, which measures groups of cases in the same way as a local replay."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from opgrip.errors import UserError
from opgrip.platform.machine import available_memory, cache_folder
from opgrip.replay.operators.devices import check_present, facts_of, is_accelerator, name_of
from opgrip.replay.results.origins import describe_environment, this_machine
from opgrip.replay.results.results import Result
from opgrip.replay.run.request import RunRequest
from opgrip.replay.run.workload import Workload, load_workload
from opgrip.replay.workers.scheduling import in_parts, interleaved, make_ahead, rows_ahead
from opgrip.replay.workers.worker import Worker

# environment variable that Ray sets to the number of an actor's processors; a replay restores the user's value
THREADS = "OMP_NUM_THREADS"
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
        self._worker: tuple[int, Worker] | None = None  # number of the repeat, and the process that measures its cases
        self._without: list[int] = []
        # path of the trace's copy, and the user's name of the trace
        self._copied = "-", "-"

    def describe(self, device: str, versions: Mapping[str, str]) -> dict[str, Any]:
        """Return facts about this machine for the header of results, or the reason why it cannot run cases.

        versions : versions of packages on the user's machine, which must be the same here
        """
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

    def compile(self, number: int, bundle: Sequence[Any], cases: Sequence[int], jobs: int | None) -> bytes:
        """Compile the programs of all rows, and return a message with the rows of each case.

        number : number of the workload in the user's command; its trace is loaded once
        bundle : list with a reference to the request and its files
        jobs : number of processes that compile; None for one per processor
        """

        def compiled() -> list[Any]:
            workload = self._load(number, bundle)
            ahead = rows_ahead(workload, {case.number for case in workload.cases} - {*cases})
            rows: dict[int, list[Any]] = {case: [] for case in cases}
            for part, most in in_parts(ahead, workload, jobs or len(os.sched_getaffinity(0))):
                for case, results in make_ahead(workload, part, most).items():
                    rows[case] += ([key, self._naming_own_trace(result).to_plain()] for key, result in results.items())
            return list(rows.items())

        return _message(compiled)

    def measure(
        self, number: int, repeat: int, bundle: Sequence[Any], cases: Sequence[int], cached: Sequence[Any]
    ) -> bytes:
        """Measure cases in the same rounds, and return a message with the rows of each case.

        number : number of the workload in the user's command; its trace is loaded once
        repeat : number of the repeat; each repeat has a new process
        bundle : list with a reference to the request and its files
        cached : (case number, row number, row) of each compiled program
        """

        def measured() -> list[Any]:
            workload = self._load(number, bundle)
            cached_rows: dict[int, dict[int, Result]] = {}
            for case, key, plain in cached:
                cached_rows.setdefault(case, {})[key] = Result.from_plain(plain)
            if self._worker is None or self._worker[0] != repeat:
                self._end_process()
                self._worker = repeat, Worker(workload, may_fork=False)
            worker, by_number = self._worker[1], {case.number: case for case in workload.cases}
            lane = worker.measure([by_number[case] for case in cases], self._without, cached_rows)
            return [[self._naming_own_trace(row).to_plain() for row in rows] for rows in interleaved({worker: lane})]

        return _message(measured)

    def _naming_own_trace(self, row: Result) -> Result:
        # the message names the user's trace instead of this machine's copy of it
        return row if row.error is None else replace(row, error=row.error.replace(*self._copied))

    def _end_process(self) -> None:
        if self._worker is not None:
            self._worker[1].close()
            self._worker = None

    def _load(self, number: int, bundle: Sequence[Any]) -> Workload:
        """Return the workload of a replay, loaded on this machine with this machine's memory limits."""
        if self._replay is not None and self._replay[0] == number:
            return self._replay[1]
        import ray

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


def _message(rows: Callable[[], list[Any]]) -> bytes:
    """Return rows, or the reason why there are none, as JSON, which can be read without executing code."""
    try:
        message: dict[str, Any] = {"rows": rows()}
    except UserError as error:
        message = {"problem": [error.problem, error.hint]}
    except (OSError, MemoryError) as error:
        # a problem of this machine, such as a full disk
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = {"unusable": lines[-1][:200] if lines else type(error).__name__}
    return json.dumps(message).encode()
