"""Options of step replay, settings of a launcher such as torchrun, and the result columns and rows of step replay."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from opgrip.cli.option_types import seconds
from opgrip.cli.options import EFFORT, IDENTITY, RUN, option, titled
from opgrip.replay.cases.selection import PROGRAM
from opgrip.replay.results.columns import Columns, column
from opgrip.replay.results.results import CONTENDED, NOISY, RAN, Result
from opgrip.replay.timing.timing_options import SEQUENCE

if TYPE_CHECKING:
    from opgrip.replay.cases.cases import Case
    from opgrip.replay.run.workload import Workload
    from opgrip.replay.sequences.step_results import SequenceResult, SignatureTimes


@titled("execution")
@dataclass(frozen=True, slots=True)
class SequenceOptions:
    sequence: bool = option(
        False,
        "replay the whole step: all calls in their recorded order, each on the results of earlier calls",
        only=("traces", "one trace"),
        role=IDENTITY,
        column="method",
        common=True,
    )
    accuracy: bool = option(
        False,
        "with --sequence: instead of timing, compare the step with a variant of it call by call, and name the calls "
        "that explain the error of its results; the variant is a --mode, --dtype, --device or --candidate (default: "
        "the same step with inputs changed in their last place)",
        only=("traces", "one trace"),
        needs=("--sequence",),
        role=RUN,
        common=True,
    )


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """One of the processes that a launcher such as torchrun started together.

    local_rank, local_world_size : rank among the processes on this machine, and their number
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int


def launch_of(environment: Mapping[str, str] = os.environ) -> RankLaunch | None:
    """Return this process's rank and the address of the ranks' store; None without a launcher."""
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    numbers = [environment.get(name, "") for name in names]
    address = environment.get("MASTER_ADDR")
    if not address or not all(text.isdecimal() for text in numbers):
        return None
    rank, world_size, port = map(int, numbers)
    local, on_machine = environment.get("LOCAL_RANK", ""), environment.get("LOCAL_WORLD_SIZE", "")
    local_rank = int(local) if local.isdecimal() else rank
    local_world_size = int(on_machine) if on_machine.isdecimal() and int(on_machine) else world_size
    return RankLaunch(rank, world_size, local_rank, local_world_size, address, port)


COLLECTIVES = "collectives"


@titled("replay of several ranks, with --sequence under torchrun")
@dataclass(frozen=True, slots=True)
class RankOptions:
    only: str | None = option(
        None,
        "run only the collectives, without the computation between them",
        choices=(COLLECTIVES,),
        only=("ranks",),
        role=RUN,
    )
    scale_ranks: bool = option(
        False,
        "with fewer ranks than recorded: run each collective among the available ranks of its group, "
        "each with its recorded amount of data (default: leave out and count such collectives)",
        only=("ranks",),
        role=RUN,
    )
    collective_timeout: float = option(
        60.0,
        "stop all ranks if one does not respond for this time (default: %(default)g)",
        parse=seconds,
        metavar="SECONDS",
        only=("ranks",),
        role=EFFORT,
    )


@dataclass(frozen=True, slots=True)
class SequenceColumns(Columns):
    substituted: int | None = column(
        "number of calls, out of `count`, that ran on generated arguments; empty if 0", heading="substituted"
    )
    not_run: int | None = column("number of calls, out of `count`, that did not run; empty if 0", heading="not run")
    redrawn: int | None = column(
        "number of calls, out of `count`, some of whose input values were generated again; empty if 0"
    )
    replayed_host_us: float | None = column(
        "median host time of the calls, if `median_us` is a device time", "us", heading="replayed host us"
    )


@dataclass(frozen=True, slots=True)
class RankColumns(Columns):
    rank: int | None = column("rank whose calls the row describes", heading="rank")
    group_ranks: str | None = column("ranks that took part in the collective, such as `0,1`")
    exchanged_bytes: int | None = column("size to which the bandwidths of the collective refer", "bytes")
    exchange_us: float | None = column(
        "median time of the collective, from the arrival of the last rank to the end of the last", "us"
    )
    wait_us: float | None = column("median time for which the rank waited for the last one to arrive", "us")
    held_us: float | None = column("median time for which the collective blocked the rank's thread", "us")
    algorithm_gb_per_s: float | None = column("`exchanged_bytes` divided by `exchange_us`", "GB/s")
    bus_gb_per_s: float | None = column(
        "`algorithm_gb_per_s` times the factor that nccl-tests defines for the collective and the number of ranks",
        "GB/s",
    )


OF_CRITICAL_PATH = ("critical_calls", "captured_critical_ms", "replayed_critical_ms")
# totals that are unknown if a trace has no times
OF_CAPTURED_TIMES = (
    *("captured_ms", "captured_host_ms", "captured_wall_ms", "unsupported_ms", "unsupported_host_ms"),
    *OF_CRITICAL_PATH,
)

OF_MODE = ("note", "first_ms", "max_abs", "max_rel")
# totals that are unknown if a trace has no dataflow
OF_DATAFLOW = (*OF_CRITICAL_PATH, "outside_bytes", "captured_peak_bytes", "replayed_peak_bytes")
# columns of a row that have the same names as attributes of `SignatureTimes`
OF_TIMES = ("samples", "median_us", "p10_us", "p90_us", "mean_us", "spread", "dropped", "slowed")
QUANTILES = {"ms": 0.5, "p10_ms": 0.1, "p90_ms": 0.9}  # quantiles over the passes, by suffix of the names of totals


def rows_of(result: SequenceResult, cases: Sequence[Case], workload: Workload) -> list[Result]:
    times_of = {item.signature: item for item in result.signatures}
    return [_row(case, times_of[case.number], workload, result.mode) for case in cases if case.number in times_of]


def totals_of(result: SequenceResult) -> dict[str, Any]:
    totals = asdict(result)
    del totals["device"], totals["signatures"], totals["saved"]
    if not result.has_captured_times:
        totals |= dict.fromkeys(OF_CAPTURED_TIMES)
    if not totals.pop("has_dataflow"):
        totals |= dict.fromkeys(OF_DATAFLOW)
    quantiles = {
        "replayed": result.replayed_quantile_ms,
        "replayed_host": result.host_quantile_ms,
        "replayed_wall": result.wall_quantile_ms,
    }
    passes = {f"{name}_ms": totals.pop(f"{name}_ms") for name in quantiles}
    for name, quantile_ms in quantiles.items():
        totals |= {f"{name}_{word}": quantile_ms(share) for word, share in QUANTILES.items()}
    if result.is_contended:
        totals |= {f"{name}_{word}": None for name in quantiles for word in QUANTILES} | {"replayed_critical_ms": None}
    totals = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in totals.items()}
    return {**totals, "passes": passes}


def _row(case: Case, times: SignatureTimes, workload: Workload, mode: str) -> Result:
    # this module is imported to print the help
    from opgrip.replay.run.workload import empty_row

    variant = next(variant for variant in workload.variants(case) if variant.mode == mode)
    row = empty_row(case, variant, workload, times.status, None if times.status in RAN else times.reason)
    row = replace(row, method=SEQUENCE, cache=PROGRAM, **{name: getattr(times, name) for name in OF_MODE})
    if times.samples:
        row = replace(
            row,
            **{name: getattr(times, name) for name in OF_TIMES},
            stopped=CONTENDED if times.status == CONTENDED else None,
            noisy=None if times.spread is None else times.spread > NOISY,
            # the dry run compared the results with the recorded ones
            faithful=None if times.substituted or times.not_run else True,
        )
    return row.adding(
        SequenceColumns(times.substituted or None, times.not_run or None, times.redrawn or None, times.host_us)
    )
