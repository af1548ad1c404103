"""Options that select cases, errors if they select none, and the run configurations of a case."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import TYPE_CHECKING, Any

from opgrip.cli.command import UNBOUNDED_HELP, counted, nearest, positive
from opgrip.cli.option_types import Cut, counts, cpus, matches
from opgrip.cli.options import CASES, IDENTITY, RUN, option, titled
from opgrip.errors import NothingSelectedError, UserError
from opgrip.replay.inputs.input_options import RECORDED

if TYPE_CHECKING:
    import pandas as pd

    from opgrip.traces import Trace

CALL, FUNCTION, MODULE = "call", "function", "module"
UNIT_KINDS = (CALL, FUNCTION, MODULE)
CANDIDATE = "--candidate"
ALL_EXCLUDED = ("--exclude-op excludes all cases", "exclude fewer")


@titled("cases")
@dataclass(frozen=True, slots=True)
class Selection(Cut):
    unit: str = option(
        CALL,
        "content of a case: one operator call, or all calls of a Python function or of a module, selected "
        "by --op or --module (default: %(default)s)",
        choices=UNIT_KINDS,
        only=("single cases", "traces"),
        role=CASES,
        common=True,
    )
    samples: tuple[str, ...] = option(
        (),
        "with --unit function: folder of samples that you trust; their code runs for the function calls that "
        "opcapture --grip recorded; can be repeated",
        repeated=True,
        metavar="FOLDER",
        only=("single cases",),
        role=CASES,
    )
    tag: tuple[str, ...] = option(
        (),
        "replay only samples with this tag; can be repeated",
        repeated=True,
        metavar="TAG",
        only=("single cases", "samples"),
        role=CASES,
    )
    op: tuple[str, ...] = option(
        (),
        "replay only operators or samples whose names match, such as 'aten.conv*'; can be repeated",
        repeated=True,
        metavar="GLOB",
        only=("single cases",),
        role=CASES,
        common=True,
    )
    exclude_op: tuple[str, ...] = option(
        (),
        "leave out operators or samples whose names match; can be repeated",
        repeated=True,
        metavar="GLOB",
        only=("single cases",),
        role=CASES,
    )
    module: tuple[str, ...] = option(
        (),
        "replay only calls of modules whose paths match, such as 'backbone.*'; can be repeated",
        repeated=True,
        metavar="GLOB",
        only=("single cases", "traces"),
        role=CASES,
        common=True,
    )
    phase: tuple[str, ...] = option(
        (),
        "replay only calls of this phase; can be repeated",
        repeated=True,
        choices=("forward", "backward", "optimizer"),
        only=("single cases", "traces"),
        role=CASES,
    )
    label: tuple[str, ...] = option(
        (),
        "replay only calls in record_function blocks whose labels match; can be repeated",
        repeated=True,
        metavar="GLOB",
        only=("single cases", "traces"),
        role=CASES,
    )
    split: bool = option(
        False,
        "replay calls of one signature as several cases if their times differ between places in the program",
        only=("single cases", "traces"),
        role=RUN,
    )
    top: int | None = option(
        None,
        "replay only the N cases with the largest share of time; with several traces, N of each trace; "
        "with --sequence, run all calls and print N rows",
        parse=positive,
        role=CASES,
        common=True,
    )
    # True if candidates select the calls: errors name `--candidate`, and the case of a module is its forward pass
    for_candidates: bool = False
    unbounded: bool = option(False, UNBOUNDED_HELP, only=("traces",), role=CASES)
    partial: bool = option(False, "replay the readable part of a damaged trace", only=("traces",), role=CASES)

    @property
    def selects_all(self) -> bool:
        return self.unit == CALL and not self.selects_some and not self.split and self.top is None

    @property
    def selects_some(self) -> bool:
        return bool(self.op or self.exclude_op or self.module or self.phase or self.label or self.tag)

    @property
    def op_flag(self) -> str:
        return f"{CANDIDATE} " if self.for_candidates else "--op "

    @property
    def module_flag(self) -> str:
        return f"{CANDIDATE} {MODULE}:" if self.for_candidates and self.unit == MODULE else "--module "

    def excludes(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.exclude_op)


def select_calls(calls: pd.DataFrame, trace: Trace, selection: Selection) -> pd.DataFrame:
    calls = _matching(calls, "op", selection.op, selection.op_flag)
    calls = _matching(calls, "module", selection.module, selection.module_flag)
    calls = _matching(calls, "phase", selection.phase, "--phase ")
    if calls.empty:
        raise no_match_of_both(selection)
    calls = calls[~calls["op"].isin([name for name in calls["op"].unique() if selection.excludes(name)])]
    if calls.empty:
        raise NothingSelectedError(*ALL_EXCLUDED)
    if selection.label:
        calls = calls.loc[calls.index.intersection(labeled_calls(trace, selection))]
    if calls.empty:
        raise no_match_within_label(selection)
    return calls


def _matching(calls: pd.DataFrame, column: str, patterns: Sequence[str], flag: str) -> pd.DataFrame:
    if not patterns:
        return calls
    matched = [name for name in calls[column].dropna().unique() if matches(name, patterns)]
    selected = calls[calls[column].isin(matched)]
    if selected.empty:
        raise no_match(calls[column], patterns, flag)
    return selected


def labeled_calls(trace: Trace, selection: Selection) -> pd.Index[int]:
    patterns = selection.label
    if not patterns:
        return trace.calls.index
    labels = trace.labels
    if not any(matches(str(label), patterns) for label in labels.index):
        raise _no_match("label", patterns, "--label ", [str(label) for label in labels.index])
    return trace.calls.index[trace.within_labels(lambda label: matches(label, patterns))]


def no_match_of_both(selection: Selection) -> NothingSelectedError:
    problem = f"no call matches all of {selection.op_flag.strip()}, --module and --phase"
    return NothingSelectedError(problem, "see opgrip trace info")


def no_match_within_label(selection: Selection) -> NothingSelectedError:
    problem = f"no call selected by {selection.op_flag.strip()}, --module and --phase is in a block with this --label"
    return NothingSelectedError(problem, "see opgrip trace info")


def no_match(names: pd.Series[Any], patterns: Sequence[str], flag: str) -> NothingSelectedError:
    return _no_match(str(names.name), patterns, flag, names.dropna().unique())


def _no_match(what: str, patterns: Sequence[str], flag: str, names: Iterable[Any]) -> NothingSelectedError:
    problem = f"no {what} matches {flag}{' '.join(patterns)}"
    distinct = sorted({str(name) for name in names} - {""})
    if not distinct:
        return NothingSelectedError(problem, f"the trace contains no {what}s")
    near = nearest(patterns[0], distinct)
    others = " and others" if len(distinct) > len(near) else ""
    wider = f"*{patterns[0]}*"
    whole = next((name for name in (*near, *distinct) if matches(name, (wider,))), None)
    advice = "" if whole is None else f"; a pattern matches whole names, so try {flag}'{wider}'"
    if whole is not None and flag.startswith(CANDIDATE):
        advice = f"; name it in full: {flag}{whole}=FILE.py:NAME"
    error = NothingSelectedError(problem, f"the trace has {', '.join(map(repr, near))}{others}{advice}")
    error.advice = advice
    return error


MOST_REASONS = 3  # maximum number of operators that are listed with reasons; others are only counted


def unconverted(trace: Trace) -> str | None:
    if "converted_from" not in trace.header or trace.end is None or not trace.end.dropped:
        return None
    dropped = sorted(trace.end.dropped, key=lambda item: -item.count)
    calls = counted(sum(item.count for item in dropped), "call")
    listing = "; ".join(f"{item.count:,} {item.op}: {item.reason}" for item in dropped[:MOST_REASONS])
    more = (
        f"; and {counted(len(dropped) - MOST_REASONS, 'other')}: see opgrip trace info"
        if len(dropped) > MOST_REASONS
        else ""
    )
    return f"{calls} of the file could not be converted: {listing}{more}"


def no_calls(trace: Trace) -> UserError:
    if lost := unconverted(trace):
        return UserError("no call of the file can be replayed", lost)
    return UserError("the trace contains no calls", "capture a program that calls operators")


FORWARD, BACKWARD = "forward", "backward"
PROGRAM = "program"  # cache state as in the program, the default


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of values of `--threads`, `--batch-scale` and `--streams`.

    batch : factor by which the recorded batch size is multiplied
    streams : number of cases that run at once, on threads or on streams of a device
    """

    threads: int | None = None
    batch: int = 1
    streams: int = 1


@titled("device and inputs")
@dataclass(frozen=True, slots=True)
class PointOptions:
    threads: tuple[int, ...] = option(
        (),
        "threads per operator (default: as captured)",
        parse=counts,
        metavar="N,...",
        only=("single cases",),
        role=IDENTITY,
        common=True,
    )
    batch_scale: tuple[int, ...] = option(
        (1,),
        "replay with these multiples of the recorded batch size (default: 1)",
        parse=counts,
        metavar="N,...",
        only=("single cases", "traces"),
        role=IDENTITY,
        common=True,
    )
    streams: tuple[int, ...] = option(
        (1,),
        "number of cases to run at once, on threads or on CUDA streams (default: 1)",
        parse=counts,
        metavar="N,...",
        only=("single cases",),
        role=IDENTITY,
    )
    pin: tuple[int, ...] = option(
        (), "run only on these processors, such as 0,2-3", parse=cpus, metavar="CPUS", only=("single cases",), role=RUN
    )

    def __iter__(self) -> Iterator[Point]:
        for threads, batch, streams in product(self.threads or (None,), self.batch_scale, self.streams):
            yield Point(threads, batch, streams)

    @property
    def notes(self) -> Sequence[str]:
        processors = len(self.pin or os.sched_getaffinity(0))
        most = max(self.threads, default=0)
        if most <= processors:
            return ()
        there_are = f"{processors} processors" if processors > 1 else "one processor"
        return (f"{most} threads would share {there_are}: this process may use no others",)

    @property
    def is_sweep(self) -> bool:
        return any(len(points) > 1 for points in (self.threads, self.batch_scale, self.streams))


@dataclass(frozen=True, slots=True)
class Variant:
    """One run configuration of a case, which becomes one row of the results.

    mode : name of the mode; if it has an argument, both are joined by a colon
    """

    number: int
    values: str
    direction: str
    mode: str
    point: Point = Point()
    cache: str | None = None

    @property
    def label(self) -> str:
        """Words that distinguish the variant from the usual one, such as `compile backward` or `eager 2 threads`."""
        usual = (FORWARD, RECORDED)
        words = [self.mode, *(word for word in (self.direction, self.values) if word not in usual)]
        if self.point.threads is not None:
            words.append(f"{self.point.threads} threads")
        if self.point.batch != 1:
            words.append(f"batch x{self.point.batch}")
        if self.point.streams != 1:
            words.append(f"{self.point.streams} streams")
        if self.cache is not None:
            words.append(f"{self.cache} cache")
        return " ".join(words)
