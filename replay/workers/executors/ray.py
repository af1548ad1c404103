"""Executor that runs cases on a Ray cluster: each worker has one device, or processors to itself, and all machines are
of one kind.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import counted
from opgrip.cli.plugins import needed
from opgrip.errors import UserError
from opgrip.replay.workers.executors import executors

if TYPE_CHECKING:
    from opgrip.cli.progress import Reporter
    from opgrip.replay.results.results import Result
    from opgrip.replay.run.measure import CachedRows
    from opgrip.replay.run.workload import Workload
    from opgrip.replay.workers.executors import EngineOptions
    from opgrip.replay.workers.ray_pool import Pool
    from opgrip.replay.workers.ray_worker import RayTask

REACH_S = 10.0  # time in seconds within which the head of a cluster must answer
# size in bytes of the object store of a cluster that is started here; it holds traces and rows
OBJECT_STORE_BYTES = 128 << 20
# environment of a cluster that is started here: no usage statistics, connections only from this machine (the second
# variable) and with a secret token, and workers at normal priority instead of Ray's lowest
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
}


class RayExecutor:
    """Runs cases on the workers of a Ray cluster; all workloads of a command use the same workers.

    The request and the files of a workload are sent to the cluster once.
    """

    runs_here = False

    def __init__(self, ray: Any, options: EngineOptions) -> None:
        self._ray, self._options = ray, options
        self._pools: dict[str, Pool] = {}
        self._workload: Workload | None = None
        self._number = self._turn = 0
        self._homes: dict[int, str] = {}
        self._bundle: Any = None

    def pool(self, device: str) -> Pool:
        """Return the workers for a device; the first request starts them."""
        from opgrip.replay.workers.ray_pool import Pool

        if device not in self._pools:
            self.close()
            pool = Pool(self._ray, self._options, device)
            self._pools[device] = pool
            try:
                pool.start()
            except BaseException:
                # else the next replay would use a pool that has not started
                self.close()
                raise
        return self._pools[device]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def check(self, workload: Workload) -> None:
        """Raise `UserError` for a device with an index other than 0; each worker checks that its device exists."""
        self._options.check((workload.device,))

    def machine_kind(self, workload: Workload) -> str:
        return self.pool(workload.device).kind

    def about(self, workload: Workload) -> dict[str, Any]:
        """Return facts about the machines and devices for the header of results; each row names its own machine."""
        from opgrip.replay.results.origins import names_of

        pool = self.pool(workload.device)
        environment = {**pool.about["environment"], "machine": names_of(pool.machines)}
        return {**pool.about, "environment": environment, "machines": dict(pool.machines)}

    def compile(self, workload: Workload, done: Collection[int], reporter: Reporter, may_fork: bool) -> CachedRows:
        """Compile rows on all workers, before any of them measures; return the rows of cases that could be compiled.

        done : numbers of finished cases, which are left out
        may_fork : not used, because workers decide whether they fork
        """
        from opgrip.replay.results.results import Result
        from opgrip.replay.workers.ray_worker import RayTask
        from opgrip.replay.workers.scheduling import rows_ahead

        self._begin(workload)
        pool = self.pool(workload.device)
        self._report_threads(workload, pool, reporter)
        numbers = list(dict.fromkeys(case.number for case, _ in rows_ahead(workload, done)))
        if not numbers:
            return {}
        size = _window_size(pool, len(numbers), MOST_COMPILED)
        tasks = [RayTask(numbers[place : place + size]) for place in range(0, len(numbers), size)]
        jobs, bundle = workload.request.limits.jobs, self._ship(workload)

        def submit(actor: Any, task: RayTask) -> Any:
            return actor.compile.options(num_returns="streaming").remote(self._number, bundle, list(task.cases), jobs)

        rows: dict[int, dict[int, Result]] = {}
        where = f"{counted(pool.size, 'worker')} of {counted(len(pool.machines), 'machine')}"
        with reporter.doing(f"compiling {counted(len(numbers), 'case')} on {where}", len(numbers)) as advance:
            for _, node, task, message in pool.deal(tasks, submit, rows):
                if message is None:
                    # it is compiled again when it is measured
                    rows.update({number: {} for number in task.cases})
                    continue
                number, plain = _unpacked(message)
                rows[number] = {way: Result.from_plain(row) for way, row in plain}
                self._homes[number] = node
                advance()
        return rows

    def run(
        self, workload: Workload, done: Collection[int], cached_rows: CachedRows, may_fork: bool
    ) -> Iterator[list[Result]]:
        from opgrip.replay.results.results import FAILED, Result
        from opgrip.replay.run.workload import empty_rows
        from opgrip.replay.workers.ray_worker import LOSSES

        self._begin(workload)
        self._turn += 1
        turn, bundle, cases = self._turn, self._ship(workload), {case.number: case for case in workload.cases}

        def submit(actor: Any, task: RayTask) -> Any:
            of_task = ((number, cached_rows.get(number, {})) for number in task.cases)
            cached = [[number, way, row.to_plain()] for number, rows in of_task for way, row in rows.items()]
            return actor.measure.options(num_returns="streaming").remote(
                self._number, turn, bundle, list(task.cases), cached
            )

        finished: set[int] = set()
        pool = self.pool(workload.device)
        for machine, _, task, message in pool.deal(self._windows(workload, pool, done), submit, finished):
            if message is None:
                reason = f"{LOSSES} workers that it ran on were lost"
                lost = [empty_rows(cases[number], workload, FAILED, reason) for number in task.cases]
                finished.update(task.cases)
                yield from ([*rows.values()] for rows in lost)
                continue
            rows = [machine.marked(Result.from_plain(row)) for row in _unpacked(message)]
            # a worker that was considered lost may have sent the rows already
            if rows and rows[0].case not in finished:
                finished.add(rows[0].case)
                yield rows

    def _begin(self, workload: Workload) -> None:
        """Make a workload the current one, with a new number by which workers know that they have to load its trace."""
        if self._workload is not workload:
            self._workload, self._number, self._homes, self._bundle = workload, self._number + 1, {}, None

    def _windows(self, workload: Workload, pool: Pool, done: Collection[int]) -> list[RayTask]:
        """Return one task for each window: a group of unfinished cases that one worker measures in the same rounds.

        Cases are assigned to the node that has their compiled programs.
        """
        from opgrip.replay.run.measure import CASES, windows
        from opgrip.replay.workers.ray_worker import RayTask

        cases = sorted((case for case in workload.cases if case.number not in done), key=workload.surroundings.first)
        most = _window_size(pool, len(cases), CASES)
        by_home: dict[str, list[Any]] = {}
        for case in cases:
            by_home.setdefault(self._homes.get(case.number, ""), []).append(case)
        return [
            RayTask([case.number for case in window], home)
            for home, at_home in by_home.items()
            for window in windows(at_home, workload, most)
        ]

    def _report_threads(self, workload: Workload, pool: Pool, reporter: Reporter) -> None:
        processors = pool.options.processors
        threads = max((case.context.get("threads") or 1 for case in workload.cases), default=1)
        if processors and not workload.request.points.threads and threads > processors:
            of_worker = f"{counted(processors, 'processor')} of a worker"
            reporter.say(
                f"the traced program ran {threads} threads, which here share the {of_worker}: "
                "set their number with --threads"
            )

    def _ship(self, workload: Workload) -> Any:
        """Put the request and the trace's files into the cluster's memory, because nodes may not share a disk; return a
        reference to them.
        """
        if self._bundle is None:
            request, device = workload.request, workload.device
            if device not in ("cpu", "meta"):
                request = replace(request, inputs=replace(request.inputs, device=device.partition(":")[0]))
            bundle = {"request": json.dumps(asdict(request)), "files": _files_of(workload)}
            # in a list, because Ray would fetch a plain reference for each task
            self._bundle = [self._ray.put(bundle)]
        return self._bundle


def _window_size(pool: Pool, cases: int, most: int) -> int:
    from opgrip.replay.workers.scheduling import PARTS

    return max(1, min(most, ceil(cases / (PARTS * max(pool.size, 1)))))


MOST_COMPILED = 16  # maximum number of cases in one compile task


def _files_of(workload: Workload) -> Mapping[str, bytes]:
    """Return the contents of the trace's file and of its files of full values, by file name; empty for folders, samples
    and operators.
    """
    from opgrip.traces.io.shipped_traces import trace_file

    try:
        path = trace_file(workload.request.trace)
    except UserError:
        return {}
    files: Sequence[Path] = [path, *workload.trace.tensor_files] if path.is_file() else []
    return {file.name: file.read_bytes() for file in files}


def _unpacked(message: bytes) -> Any:
    """Return the content of a worker's JSON message; raise the `UserError` that the message reports, if any."""
    said = json.loads(message)
    if isinstance(said, dict):
        raise UserError(*said["problem"])
    return said


def _check_reachable(address: str | None) -> None:
    """Raise `UserError` if nothing listens at a cluster's address; Ray itself would retry for minutes."""
    match = re.fullmatch(r"(?:ray://)?\[?([^]/]+)\]?:([0-9]{1,5})", address or "")
    if match is None:
        return
    try:
        socket.create_connection((match[1], min(int(match[2]), 65535)), timeout=REACH_S).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(
            f"no Ray cluster can be reached at {address}: {reason}", "check the cluster with: ray status"
        ) from error


@executors.register("ray")
@contextmanager
def start_ray(options: EngineOptions, processors: int | None = None) -> Iterator[RayExecutor]:
    """Connect to a Ray cluster and yield an executor; without an address, start a cluster on this machine that ends
    with the block.

    processors : number of processors that a cluster on this machine offers; None for those available to this process
    Raises `UserError` if ray is not installed, or the cluster cannot be reached.
    """
    with _connected(options, processors or len(os.sched_getaffinity(0))) as ray:
        executor = RayExecutor(ray, options)
        try:
            yield executor
        finally:
            executor.close()


@contextmanager
def _connected(options: EngineOptions, processors: int) -> Iterator[Any]:
    _check_reachable(options.address)
    quiet = {} if options.address else QUIET | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in quiet}
    # ray reads them when it is imported
    os.environ.update(quiet)
    try:
        ray = needed("ray", "ray")
        needed("ray.util.scheduling_strategies", "ray")
        if ray.is_initialized():
            # initialized by the calling program
            yield ray
            return
        with tempfile.TemporaryDirectory(prefix="opgrip-ray-", ignore_cleanup_errors=True) as folder:
            own = {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "num_cpus": processors,
                "_temp_dir": folder,
            }
            try:
                ray.init(
                    **({"address": options.address} if options.address else own),
                    log_to_driver=False,
                    logging_level="ERROR",
                )
            except (ConnectionError, OSError, RuntimeError, ValueError) as error:
                where = f"at {options.address}" if options.address else "here"
                said = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise UserError(
                    f"no Ray cluster can be reached {where}: {said[:200]}", "check the cluster with: ray status"
                ) from error
            try:
                yield ray
            finally:
                ray.shutdown()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
