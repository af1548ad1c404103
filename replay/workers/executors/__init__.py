"""Executors, which run the cases of a replay in worker processes on this machine or on a cluster, and their options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from opgrip.cli.command import InvalidValueError, did_you_mean, not_negative, positive
from opgrip.cli.options import CASES, EFFORT, RUN, option, titled
from opgrip.cli.plugins import Registry
from opgrip.cli.progress import Reporter
from opgrip.errors import UserError
from opgrip.platform.sandbox import check_bubblewrap
from opgrip.replay.results.results import Result
from opgrip.replay.run.request import Shard
from opgrip.replay.run.request import shard as shard_of_text

if TYPE_CHECKING:
    from opgrip.replay.run.measure import CachedRows
    from opgrip.replay.run.workload import Workload


PROCESSES = "processes"
NEEDS_RAY = ("--engine ray",)


class ExecutorLostError(UserError):
    pass


class Executor(Protocol):
    """Runs the cases of workloads (loaded traces with their cases), one workload after another.

    runs_here : True if cases run on this machine
    """

    runs_here: bool

    def check(self, workload: Workload) -> None:
        """Raise `UserError` if a device that the workload needs is missing."""

    def machine_kind(self, workload: Workload) -> str:
        """Return the kind of machine, such as its processor; a replay resumes only on machines of the same kind."""

    def about(self, workload: Workload) -> dict[str, Any]:
        """Return facts about machines and devices for the header of results; call it after the cases have run."""

    def compile(self, workload: Workload, done: Collection[int], reporter: Reporter, may_fork: bool) -> CachedRows:
        """Compile the functions of rows whose mode needs a compiler; return these rows by case number and row number.

        done : numbers of finished cases, which are left out
        may_fork : True if this process has not used torch yet, so that it can be forked
        """

    def run(
        self, workload: Workload, done: Collection[int], cached_rows: CachedRows, may_fork: bool
    ) -> Iterator[list[Result]]:
        """Yield the rows of each case, in any order, each case once."""


# function that starts an executor, as a context manager that ends it
StartExecutor = Callable[["EngineOptions"], AbstractContextManager[Executor]]

# executors by the name that `--engine` takes
executors: Registry[StartExecutor] = Registry("opgrip.replay.workers.executors", "opgrip.engines")


@contextmanager
def start_executor(options: EngineOptions, devices: Sequence[str] = (), pin: Sequence[int] = ()) -> Iterator[Executor]:
    options.check(devices, pin)
    start = executors.get(options.engine)
    assert start is not None, "one of its choices"
    with start(options) as executor:
        yield executor


def engine_name(text: str) -> str:
    if executors.get(text) is None:
        hint = did_you_mean(text, executors.names(), f"choose from {', '.join(executors.names())}")
        raise InvalidValueError(f"unknown engine {text!r}: {hint}")
    return text


@titled("workers and shards")
@dataclass(frozen=True, slots=True)
class EngineOptions:
    engine: str = option(
        PROCESSES,
        "where workers run: processes on this machine, or ray for a Ray cluster (default: %(default)s)",
        parse=engine_name,
        metavar="NAME",
        only=("single cases",),
        role=EFFORT,
    )
    address: str | None = option(
        None,
        "with --engine ray: address of the cluster, such as 10.0.0.1:6379, or auto for the one on this "
        "machine (default: start a cluster here)",
        metavar="HOST:PORT",
        needs=NEEDS_RAY,
        role=EFFORT,
    )
    workers: int | None = option(
        None,
        "with --engine ray: maximum number of workers (default: one per accelerator; on CPUs one per machine, or as "
        "many as --processors allows)",
        parse=positive,
        needs=NEEDS_RAY,
        role=EFFORT,
    )
    processors: int | None = option(
        None,
        "with --engine ray: number of processors reserved for each worker; 0 lets workers share processors, "
        "which makes their times unusable (default: all processors of a machine)",
        parse=not_negative,
        needs=NEEDS_RAY,
        role=RUN,
    )
    machine_kind: str | None = option(
        None,
        "with --engine ray: use only machines whose kind (accelerator, processor and number of processors) matches "
        "this pattern, such as 'NVIDIA H100*'",
        metavar="GLOB",
        needs=NEEDS_RAY,
        role=CASES,
    )
    sandbox: bool = option(
        False,
        "run workers under bubblewrap, without network and write access, for traces that you do not trust",
        role=EFFORT,
        common=True,
    )
    shard: Shard | None = option(
        None,
        "run only part I of N of the cases, balanced by time; auto takes I and N from torchrun, Slurm or "
        "Open MPI; {shard} in the --output name is replaced by the shard; opgrip results merge joins the "
        "files",
        parse=shard_of_text,
        metavar="I/N",
        only=("single cases",),
        role=CASES,
        common=True,
    )

    def check(self, devices: Sequence[str] = (), pin: Sequence[int] = ()) -> None:
        if self.engine != PROCESSES:
            if self.sandbox:
                raise UserError(
                    "--sandbox applies only to workers on this machine", f"leave it out with --engine {self.engine}"
                )
            if len(devices) > 1 or any(device.partition(":")[2] not in {"", "0"} for device in devices):
                raise UserError(f"{self.engine} spreads cases over devices itself", "give --device without a number")
            if pin:
                raise UserError(
                    "--pin applies only to workers on this machine", "give workers their processors with --processors"
                )
            return
        if self.sandbox:
            check_bubblewrap()


@executors.register(PROCESSES)
@contextmanager
def start_processes(options: EngineOptions) -> Iterator[Executor]:
    # loads torch, and this file is imported to show the help
    from opgrip.replay.run.worker import LocalExecutor

    yield LocalExecutor()
