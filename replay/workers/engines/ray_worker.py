"""What runs on each slot of a Ray cluster: an actor that measures windows of cases by the stages of a plain replay."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opgrip.errors import UserError

if TYPE_CHECKING:
    from opgrip.replay.workers.connection import Connection
    from opgrip.replay.workers.job import Job, Loaded

THREADS = "OMP_NUM_THREADS"
"""Which Ray sets to what an actor reserves: a replay has what its user has said."""


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
            from opgrip.replay.workers.engines.engine_options import Processors

            self._processors = Processors(processors)
        except UserError as error:
            self._problem = [error.problem, error.hint]
        self._folder = tempfile.TemporaryDirectory(prefix="opgrip-")
        self._replay: tuple[int, Job, Loaded] | None = None
        self._connection: tuple[int, Connection] | None = None
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
        yield from _telling(self._compile(number, bundle, cases, jobs))

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
        yield from _telling(self._measure(number, turn, bundle, cases, cached))

    def _compile(self, number: int, bundle: Sequence[Any], cases: Sequence[int], jobs: int | None) -> Iterator[Any]:
        from opgrip.replay.workers.ahead import in_parts, make_ahead, rows_ahead

        job, loaded = self._load(number, bundle)
        ahead = rows_ahead(loaded, {case.number for case in loaded.cases} - {*cases})
        rows: dict[int, dict[int, Any]] = {case: {} for case in cases}
        for part, most in in_parts(ahead, loaded.settings, jobs or len(os.sched_getaffinity(0))):
            for case, results in make_ahead(job, loaded, part, most, job.plan.limits.timeout).items():
                rows[case].update({way: result.to_plain() for way, result in results.items()})
        yield from ([case, list(results.items())] for case, results in rows.items())

    def _measure(
        self, number: int, turn: int, bundle: Sequence[Any], cases: Sequence[int], cached: Sequence[Any]
    ) -> Iterator[Any]:
        from opgrip.replay.results.results import Result
        from opgrip.replay.workers.spread import interleaved
        from opgrip.replay.workers.supervisor import run_window

        job, loaded = self._load(number, bundle)
        cached_rows: dict[int, dict[int, Result]] = {}
        for case, way, plain in cached:
            cached_rows.setdefault(case, {})[way] = Result.from_plain(plain)
        process, by_number = self._process(turn, job, loaded), {case.number: case for case in loaded.cases}
        window = [by_number[case] for case in cases]
        for rows in interleaved({process: run_window(process, window, self._without, loaded, cached_rows)}):
            yield [row.to_plain() for row in rows]

    def _process(self, turn: int, job: Job, loaded: Loaded) -> Connection:
        """The process that measures, the same for all windows of a turn."""
        from opgrip.replay.workers.connection import Connection

        if self._connection is None or self._connection[0] != turn:
            self._end_process()
            connection = Connection(job, loaded, job.plan.limits.timeout, may_fork=False)
            self._connection = turn, connection.__enter__()
        return self._connection[1]

    def _end_process(self) -> None:
        if self._connection is not None:
            self._connection[1].__exit__(None, None, None)
            self._connection = None

    def _load(self, number: int, bundle: Sequence[Any]) -> tuple[Job, Loaded]:
        """The job of a replay, its trace loaded, for what this machine has."""
        if self._replay is not None and self._replay[0] == number:
            return self._replay[1:]
        import ray

        from opgrip.platform.machine import available_memory, cache_folder
        from opgrip.replay.operators.devices import is_accelerator
        from opgrip.replay.workers.job import Job

        self._end_process()
        self._replay, self._without = None, []
        said: Mapping[str, Any] = ray.get(bundle[0])
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(prefix="opgrip-")
        for name, content in said["files"].items():
            (Path(self._folder.name) / name).write_bytes(content)
        job = Job.from_plain(json.loads(said["job"]))
        if said["files"]:
            job = replace(job, trace=str(Path(self._folder.name) / next(iter(said["files"]))))
        plan = replace(job.plan, store=None if job.plan.store is None else str(cache_folder()))
        loaded = replace(job, plan=plan).load()
        limit, device = plan.limits.memory_limit, loaded.settings.device
        if limit is None and not is_accelerator(device):
            free = available_memory(device)
            limit = None if free is None else free // self._slots
        limits = replace(plan.limits, memory_limit=limit)
        job = replace(job, plan=replace(plan, limits=limits))
        self._replay = number, job, replace(loaded, settings=replace(loaded.settings, limits=limits))
        return self._replay[1:]


def _telling(messages: Iterator[Any]) -> Iterator[bytes]:
    """Messages as they go through the cluster: JSON, which no reader runs; and the user's mistake that ends them."""
    try:
        for message in messages:
            yield json.dumps(message).encode()
    except UserError as error:
        yield json.dumps({"problem": [error.problem, error.hint]}).encode()
