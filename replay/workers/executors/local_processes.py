"""The default executor: worker processes of this machine, one for each device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import counted
from opgrip.replay.workers.executors.executor import PROCESSES, EngineOptions, executors

if TYPE_CHECKING:
    from opgrip.cli.progress import Reporter
    from opgrip.replay.results.results import Result
    from opgrip.replay.run.measure import CachedRows
    from opgrip.replay.run.workload import Workload


class LocalExecutor:
    """Executor of cases in worker processes of this machine."""

    runs_here = True

    def check(self, workload: Workload) -> None:
        """Raise `UserError` if devices are missing or differ."""
        from opgrip.replay.operators.devices import check_equal, check_present

        for name in workload.devices:
            check_present(name)
        check_equal(workload.devices)

    def machine_kind(self, workload: Workload) -> str:
        """Return the kind of this machine without its device, because asking for the device creates a context.

        The header names the device.
        """
        from opgrip.replay.results.origins import this_machine

        return this_machine("cpu").kind

    def about(self, workload: Workload) -> dict[str, Any]:
        """Return facts about the device for the header; this creates a context."""
        from opgrip.replay.operators.devices import facts_of, name_of
        from opgrip.replay.results.origins import describe_environment

        device = workload.device
        return {"device": name_of(device), "environment": describe_environment(device), **facts_of(device)}

    def compile(self, workload: Workload, done: Collection[int], reporter: Reporter, may_fork: bool) -> CachedRows:
        """Compile the rows that need a compiler."""
        from opgrip.replay.workers.scheduling import DealtWindows, in_parts, make_ahead, rows_ahead

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
                        for number, made in make_ahead(own, part, jobs, may_fork, advance).items():
                            rows.setdefault(number, {}).update(made)
            except KeyboardInterrupt:
                reporter.say("what is compiled is kept for the next time")
                raise
        return rows

    def run(
        self, workload: Workload, done: Collection[int], cached_rows: CachedRows, may_fork: bool
    ) -> Iterator[list[Result]]:
        """Yield the rows of the cases that are not done, as they arrive."""
        from opgrip.replay.workers.scheduling import run_cases

        return run_cases(workload, done, may_fork, cached_rows)


@executors.register(PROCESSES)
@contextmanager
def start_processes(options: EngineOptions) -> Iterator[LocalExecutor]:
    """Start the executor, which needs no setup."""
    yield LocalExecutor()
