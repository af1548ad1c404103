"""What runs on each slot of a Ray cluster: an actor that measures windows of cases by the stages of a plain replay."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from opgrip.errors import UserError

if TYPE_CHECKING:
    from opgrip.replay.run.workload import Workload
    from opgrip.replay.workers.worker import Worker

THREADS = "OMP_NUM_THREADS"
"""Which Ray sets to what an actor reserves: a replay has what its user has said."""


WAIT_S, POLL_S = 60.0, 0.2
"""For processors that another worker leaves: how long, and how often they are tried."""


class Processors:
    """Processors that this process and those that it starts are bound to, and no other worker of this user.

    Each is a locked file, which the system unlocks when this process has ended, in whatever way.

    Parameters
    ----------
    count : how many; none are taken for 0, and the process may use what it could before

    Attributes
    ----------
    numbers : theirs, ascending

    Raises
    ------
    UserError : where other workers have them
    """

    def __init__(self, count: int, wait_s: float = WAIT_S) -> None:
        self._files: list[int] = []
        self.numbers: Sequence[int] = ()
        if not count:
            return
        usable = sorted(os.sched_getaffinity(0))
        if count > len(usable):
            raise UserError(f"there are {len(usable)} processors here, and not {count}", "give fewer to --processors")
        folder = Path(tempfile.gettempdir()) / f"opgrip-processors-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        end = monotonic() + wait_s
        while not self._take(folder, usable, count):
            if monotonic() > end:
                raise UserError(f"other workers have so many processors that {count} are not free", "give fewer")
            sleep(POLL_S)
        os.sched_setaffinity(0, self.numbers)

    def close(self) -> None:
        """Leave them to others."""
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _take(self, folder: Path, usable: Sequence[int], count: int) -> bool:
        """Take so many, or none."""
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
    """A worker on one machine: a device, or pinned processors, that it has to itself.

    Parameters
    ----------
    processors : that it is bound to; 0 for no pinning
    threads : what the user's environment says of `OMP_NUM_THREADS`
    slots : workers of this machine, which share its memory
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

    def describe(self, device: str, versions: Mapping[str, str]) -> dict[str, Any]:
        """The machine, as the header of results has it; or why cases cannot run on it.

        Parameters
        ----------
        versions : of packages where the replay was asked for, which have to be those here
        """
        from dataclasses import asdict

        import torch

        from opgrip.replay.operators.devices import check_present, facts_of, name_of
        from opgrip.replay.results.origins import this_machine
        from opgrip.replay.results.run_environment import describe_environment

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
        """Leave nothing behind."""
        self._end_process()
        self._folder.cleanup()

    def compile(self, number: int, bundle: Sequence[Any], cases: Sequence[int], jobs: int | None) -> Iterator[bytes]:
        """What came of making rows ready, a message a case."""
        yield from _encoded(self._compile(number, bundle, cases, jobs))

    def measure(
        self, number: int, turn: int, bundle: Sequence[Any], cases: Sequence[int], cached: Sequence[Any]
    ) -> Iterator[bytes]:
        """The rows of cases, a message a case, as they come.

        Parameters
        ----------
        number : of the replay, whose trace is loaded once
        turn : of the replay's repeats, each of which has a process of its own
        bundle : one reference to its job and files
        cached : case, way and row of what was compiled
        """
        yield from _encoded(self._measure(number, turn, bundle, cases, cached))

    def _compile(self, number: int, bundle: Sequence[Any], cases: Sequence[int], jobs: int | None) -> Iterator[Any]:
        from opgrip.replay.workers.scheduling import in_parts, make_ahead, rows_ahead

        workload = self._load(number, bundle)
        ahead = rows_ahead(workload, {case.number for case in workload.cases} - {*cases})
        rows: dict[int, dict[int, Any]] = {case: {} for case in cases}
        for part, most in in_parts(ahead, workload, jobs or len(os.sched_getaffinity(0))):
            for case, results in make_ahead(workload, part, most).items():
                rows[case].update({way: result.to_plain() for way, result in results.items()})
        yield from ([case, list(results.items())] for case, results in rows.items())

    def _measure(
        self, number: int, turn: int, bundle: Sequence[Any], cases: Sequence[int], cached: Sequence[Any]
    ) -> Iterator[Any]:
        from opgrip.replay.results.results import Result
        from opgrip.replay.workers.scheduling import interleaved

        workload = self._load(number, bundle)
        cached_rows: dict[int, dict[int, Result]] = {}
        for case, way, plain in cached:
            cached_rows.setdefault(case, {})[way] = Result.from_plain(plain)
        worker, by_number = self._worker_of(turn, workload), {case.number: case for case in workload.cases}
        window = [by_number[case] for case in cases]
        for rows in interleaved({worker: worker.measure(window, self._without, cached_rows)}):
            yield [row.to_plain() for row in rows]

    def _worker_of(self, turn: int, workload: Workload) -> Worker:
        """Return the process that measures, the same one for all windows of a turn."""
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
        """Load the workload of a replay, with the limits of this machine."""
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
            request = replace(request, trace=str(Path(self._folder.name) / next(iter(shipped["files"]))))
        workload = load_workload(replace(request, store=None if request.store is None else str(cache_folder())))
        limit = request.limits.memory_limit
        if limit is None and not is_accelerator(workload.device):
            free = available_memory(workload.device)
            limit = None if free is None else free // self._slots
        workload = workload.with_request(limits=replace(request.limits, memory_limit=limit))
        self._replay = number, workload
        return workload


def _encoded(messages: Iterator[Any]) -> Iterator[bytes]:
    """Yield messages as JSON, which runs no code where it is read; last the `UserError` that ended them."""
    try:
        for message in messages:
            yield json.dumps(message).encode()
    except UserError as error:
        yield json.dumps({"problem": [error.problem, error.hint]}).encode()
