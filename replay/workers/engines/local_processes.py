"""The usual engine: one process of this machine for each device, and how the engine that is asked for starts."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opgrip.cli.options import from_arguments
from opgrip.cli.plural import counted
from opgrip.replay.cases.variants import PointOptions
from opgrip.replay.inputs.input_options import InputOptions
from opgrip.replay.workers.engines.engine import Engine, engines
from opgrip.replay.workers.engines.engine_options import EngineOptions

if TYPE_CHECKING:
    from opgrip.cli.progress import Reporter
    from opgrip.replay.results.results import Result
    from opgrip.replay.run.measure import CachedRows
    from opgrip.replay.workers.ahead import Row
    from opgrip.replay.workers.engines.engine_options import EngineOptions
    from opgrip.replay.workers.job import Job, Loaded


@contextmanager
def start_engine(args: argparse.Namespace) -> Iterator[Engine]:
    """The engine, which ends with the block.

    Raises
    ------
    UserError : where it cannot be started, or options are not for it
    """
    options = from_arguments(EngineOptions, args)
    options.check(from_arguments(InputOptions, args).devices, from_arguments(PointOptions, args).pin)
    start = engines.get(options.engine)
    assert start is not None, "one of its choices"
    with start(options) as engine:
        yield engine


class ProcessEngine:
    """Runs cases in processes of this machine."""

    here = True

    def runner(self, job: Job, loaded: Loaded, may_fork: bool) -> ProcessRunner:
        """What runs the cases of one replay."""
        return ProcessRunner(job, loaded, may_fork)


class ProcessRunner:
    """Runs the cases of one replay."""

    def __init__(self, job: Job, loaded: Loaded, may_fork: bool) -> None:
        self._job, self._loaded, self._may_fork = job, loaded, may_fork

    def check(self) -> None:
        """Raise `UserError` where the devices are not there, or are not equal."""
        from opgrip.replay.operators.devices import check_equal, check_present

        for name in self._loaded.devices:
            check_present(name)
        check_equal(self._loaded.devices)

    def machine_kind(self) -> str:
        """What this machine is, but for its device, which the header names: to ask for it makes a context."""
        from opgrip.replay.results.origins import this_machine

        return this_machine("cpu").kind

    def about(self) -> dict[str, Any]:
        """What the header says of the device; makes a context."""
        from opgrip.replay.operators.devices import facts_of, name_of
        from opgrip.replay.results.run_environment import describe_environment

        device = self._loaded.settings.device
        return {"device": name_of(device), "environment": describe_environment(device), **facts_of(device)}

    def compile(self, done: Collection[int], reporter: Reporter) -> CachedRows:
        """What came of compiling the rows that take a compiler."""
        from opgrip.replay.workers.ahead import in_parts, make_ahead, rows_ahead

        for device in self._loaded.devices:
            self._job.plan.energy.check(device)
        ahead = rows_ahead(self._loaded, done)
        if not ahead:
            return {}
        limits, cases = self._job.plan.limits, len(self._loaded.cases) - len(done)
        rows: dict[int, dict[int, Result]] = {}
        doing = f"compiling {counted(len(ahead), 'row')} of {counted(cases, 'case')}"
        with reporter.doing(doing, len(ahead)) as advance:
            try:
                for device, dealt in self._dealt(ahead, done):
                    job, loaded = self._job.on(device), self._loaded.on(device)
                    for part, jobs in in_parts(dealt, loaded.settings, limits.compilers):
                        results = make_ahead(job, loaded, part, jobs, limits.timeout, self._may_fork, advance)
                        for number, row_of_way in results.items():
                            rows.setdefault(number, {}).update(row_of_way)
            except KeyboardInterrupt:
                reporter.say("what is compiled is kept for the next time")
                raise
        return rows

    def run(self, done: Collection[int], cached_rows: CachedRows) -> Iterator[list[Result]]:
        """The rows of the cases that are not done, as they come."""
        from opgrip.replay.workers.supervisor import supervise

        timeout = self._job.plan.limits.timeout
        return supervise(self._job, self._loaded, timeout, set(done), self._may_fork, cached_rows)

    def _dealt(self, ahead: Sequence[Row], done: Collection[int]) -> Iterator[tuple[str, list[Row]]]:
        """Each device with the rows of the cases that it begins with: compilers keep what they made for one device."""
        from opgrip.replay.workers.spread import Windows

        windows = Windows(self._loaded, done)
        for device in self._loaded.devices:
            numbers = {case.number for case in windows.dealt_to(device)}
            yield device, [row for row in ahead if row[0].number in numbers]


@engines.register("processes")
@contextmanager
def start_processes(options: EngineOptions) -> Iterator[ProcessEngine]:
    """The engine, which takes nothing before a replay runs."""
    yield ProcessEngine()
