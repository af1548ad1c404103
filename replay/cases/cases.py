"""Cases, the units of replay: each one represents the calls of one signature of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pandas as pd

from opgrip.errors import UserError
from opgrip.replay.cases.call_sites import CallSite, count_call_sites
from opgrip.replay.cases.flow import shares_of_fresh
from opgrip.replay.cases.selection import Selection, no_calls, select_calls
from opgrip.replay.cases.timing_clusters import (
    COLUMNS,
    PlacedCalls,
    TimingCluster,
    calls_looked_at,
    captured_times,
    input_set_of,
    placed_calls,
    weights_of,
)
from opgrip.replay.inputs.filling import Stored, drawn_values
from opgrip.replay.operators.lookup import Operator
from opgrip.traces import Trace
from opgrip.traces.codec.record_forms import key_of_case, key_of_part
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.records import Observed, Signature
from opgrip.traces.schema.tensor_specs import value_numbers
from opgrip.traces.table.call_table import COUNT, counts_of
from opgrip.traces.table.profiler_labels import own_calls
from opgrip.traces.values import Drawable
from opgrip.traces.zoo.manifest import chosen_numbers

MOST_INPUT_SETS = 8  # maximum number of input sets of a case in addition to the first one


@dataclass(frozen=True, slots=True)
class Case:
    """The calls of one signature, or of one timing cluster of it, with everything needed to replay them.

    A timing cluster is a group of calls of one signature whose times differ from the times of its other calls.

    values : by number, the value model or the recorded values of each tensor in `signature` and `input_sets`
    count : number of calls in the program
    captured_us : median time of a call in the program: device time if the calls ran on a device, else host time
    captured_total_us : sum of the calls' times in the program
    captured_host_us : median host time of a call, if `captured_us` is a device time
    captured_spread : interquartile range of the calls' times, relative to their median; None if there is only one call,
        or if the times are estimated parts of a CUDA graph's launches
    perturbed : number of calls that ran right after the capture's own work; they are included in `count`
    share : part of the time of all selected calls that this case takes (from 0 to 1), if each of its calls takes
        `captured_us`
    context : torch settings, such as autocast, under which most calls ran
    phase : phase in which most calls ran
    call_sites : the places in the program that made the calls
    input_sets : further sets of inputs: copies of the signature with the values and results of later calls
    timing_clusters : timing cluster of the signature, followed by that of each input set; empty if all input sets are
        equally frequent
    fresh : share of calls whose results were in newly mapped memory pages; None if unknown or irrelevant
    operator : the operator to call, if it differs from the signature's
    reference : the operator whose results are the reference in every mode; None to use the case's own results in the
        reference mode
    unused : indices of results that the program does not use (see `with_unused_results`)
    part_of : number of the signature in the trace, if the case is one timing cluster of that signature
    load : function that completes the case in the process that runs it; None if the case is complete
    """

    signature: Signature
    values: Mapping[int, Drawable]
    count: int
    captured_us: float
    captured_total_us: float
    share: float
    context: Mapping[str, Any] = field(default_factory=dict)
    phase: str = "forward"
    input_sets: Sequence[Signature] = ()
    timing_clusters: Sequence[TimingCluster] = ()
    fresh: float | None = None
    operator: Operator | None = None
    reference: Operator | None = None
    captured_host_us: float | None = None
    captured_spread: float | None = None
    perturbed: int = 0
    unused: frozenset[int] = frozenset()
    part_of: int | None = None
    call_sites: Sequence[CallSite] = ()
    load: Callable[[int], Case] | None = None

    @property
    def number(self) -> int:
        """Number that identifies the case: its signature's number in the trace or, for a timing cluster, a number that
        no signature has.
        """
        return self.signature.number

    @property
    def trace_number(self) -> int:
        """Number of the case's signature in the trace."""
        return self.number if self.part_of is None else self.part_of

    @property
    def op(self) -> str:
        return self.signature.op

    @property
    def key(self) -> str:
        """Text that identifies the case; equal calls have the same key in every trace."""
        key = key_of_case(self.signature, self.context)
        return key if self.part_of is None else key_of_part(key, *(item.place for item in self.timing_clusters))


def make_cases(
    trace: Trace, selection: Selection = Selection(), with_preceding_calls: bool = False, in_order: bool = False
) -> list[Case]:
    """Return one case per signature, largest share of time first.

    Calls made inside a function of an extension module are not cases, because they are part of that function. A gripped
    Python function is represented by the operator calls that it made. A distilled trace, which was reduced to
    representative cases, also contains calls that only run before these cases; they are left out.

    with_preceding_calls : True to include the calls that only run before the cases
    in_order : True to keep the order of signatures if no call has a time
    Raises `UserError` if a pattern of `selection` matches nothing.
    """
    looked_at = calls_looked_at(trace)
    placed = placed_calls(trace, looked_at)
    if selection.label:
        calls = trace.own_calls.assign(**{COUNT: 1})
    else:
        calls = _with_single(trace.own_distinct_calls, looked_at)
    chosen = None if with_preceding_calls else chosen_numbers(trace.header)
    if chosen is not None:
        calls = calls[calls["signature"].isin(chosen)]
    if calls.empty:
        raise no_calls(trace)
    calls = select_calls(calls, trace, selection)
    kinds = list(_kinds(trace, placed, calls.index, selection.split))
    cases = _cases(trace, calls, kinds, in_order)
    if not cases:
        raise UserError("the trace lacks the signatures of its calls", "capture it again")
    cases.sort(key=lambda case: (-case.share, case.number))
    return cases[: selection.top]


def _cases(trace: Trace, calls: pd.DataFrame, kinds: Sequence[_Kind], in_order: bool) -> list[Case]:
    numbers = _numbers_of_cases(calls, kinds)
    times_by_case = captured_times(calls, numbers, [item for kind in kinds for item in kind.timing_clusters])
    weights = weights_of(times_by_case, {} if in_order else {kind.signature.number: kind.signature for kind in kinds})
    total = max(sum(weights.values()), 1.0)
    call_sites = count_call_sites(calls, numbers)
    contexts = contexts_of(trace, calls)
    fresh = shares_of_fresh(trace, calls)
    phases = _most_frequent(calls, calls["phase"])
    drawn = drawn_values(trace)
    estimated = trace.source.graphs.estimated
    cases = []
    for kind in kinds:
        case_number, number = kind.signature.number, kind.number
        times = times_by_case.get(case_number)
        if times is not None:
            cases.append(
                Case(
                    kind.signature,
                    values_of((kind.signature, *kind.input_sets), drawn),
                    count=times.count,
                    captured_us=times.median_us,
                    captured_total_us=times.total_us,
                    share=weights[case_number] / total,
                    context=contexts.get(number, {}),
                    phase=phases.get(number, "forward"),
                    call_sites=call_sites.get(case_number, ()),
                    input_sets=kind.input_sets,
                    timing_clusters=kind.timing_clusters,
                    fresh=fresh.get(number),
                    captured_host_us=times.host_us,
                    captured_spread=None if number in estimated else times.spread,
                    perturbed=times.perturbed,
                    part_of=number if number != case_number else None,
                )
            )
    return cases


def _with_single(distinct: pd.DataFrame, looked_at: pd.DataFrame) -> pd.DataFrame:
    """Return a table of calls in which `count` is the number of calls that a row represents: a row for each call in
    `looked_at`, and a row for each distinct call of all other signatures.

    Rows of single calls keep their index in the trace's call table. If `looked_at` contains only a sample of a
    signature's calls, the counts of its rows add up to the number of all its calls.
    """
    if looked_at.empty:
        return distinct
    single = own_calls(looked_at)
    is_single = distinct["signature"].isin(single["signature"].unique())
    others = distinct[~is_single]
    others.index = pd.RangeIndex(-len(others), 0)
    there = single.groupby("signature")["signature"]
    all_calls = single["signature"].map(distinct[is_single].groupby("signature")[COUNT].sum())
    share, more = divmod(all_calls, there.transform("size"))
    counts = share + (there.cumcount() < more)
    return pd.concat([others[[*COLUMNS, COUNT]], single[COLUMNS].assign(**{COUNT: counts.astype("int64")})])


@dataclass(frozen=True, slots=True)
class _Kind:
    """The calls of one signature, or of one timing cluster of it, that become one case.

    number : number of the signature in the trace
    signature : copy of the signature; its number is the number of the case
    input_sets : copies of the signature with the values of other calls
    timing_clusters : timing cluster of `signature`, followed by that of each input set
    calls : indices of the case's calls in the call table; None for all calls of the signature
    """

    number: int
    signature: Signature
    input_sets: tuple[Signature, ...] = ()
    timing_clusters: tuple[TimingCluster, ...] = ()
    calls: pd.Index[int] | None = None


def _kinds(trace: Trace, placed: Mapping[int, PlacedCalls], selected: pd.Index[int], split: bool) -> Iterator[_Kind]:
    numbers = count(max((signature.number for signature in trace.signatures), default=0) + 1)
    for signature in trace.signatures:
        number = signature.number
        observed: Sequence[Observed] = trace.observed.get(number, ())
        timing_clusters: list[TimingCluster] = []
        if number in placed:
            observed, timing_clusters = placed[number].observed_in(selected), placed[number].clusters(selected)
        # numbered before the selection, so that numbers do not depend on it
        alone = [replace(item.signature, number=next(numbers)) for item in timing_clusters] if split else []
        present = [item for item in timing_clusters if len(item.calls)]
        if split and present:
            for item, part in zip(timing_clusters, alone, strict=True):
                yield _Kind(number, part, timing_clusters=(item,), calls=item.calls)
        elif present:
            present.sort(key=lambda item: -len(item.calls))
            first, *others = (item.signature for item in present)
            yield _Kind(number, first, tuple(others), tuple(present))
        else:
            yield _Kind(number, signature, _observed_input_sets(signature, observed))


def _numbers_of_cases(calls: pd.DataFrame, kinds: Iterable[_Kind]) -> pd.Series[int]:
    numbers = calls["signature"].copy()
    for kind in kinds:
        if kind.calls is not None:
            numbers[kind.calls] = kind.signature.number
    return numbers


def contexts_of(trace: Trace, calls: pd.DataFrame) -> dict[int, Mapping[str, Any]]:
    """Return, by signature number, the torch settings (such as autocast) under which most of the
    signature's calls ran.
    """
    context_of = {scope.number: scope.context for scope in trace.scopes}
    contexts = _most_frequent(calls, calls["scope"].map(context_of))
    return {signature: trace.contexts.get(int(number), {}) for signature, number in contexts.items()}


def _most_frequent(calls: pd.DataFrame, values: pd.Series[Any]) -> dict[int, Any]:
    """Return, by signature number, the value that occurs most often among the signature's calls, without missing
    values; the first one if several are equally frequent.
    """
    pairs = pd.DataFrame({"signature": calls["signature"], "value": values, COUNT: counts_of(calls)}).dropna()
    counts = pairs.groupby(["signature", "value"], sort=False, observed=True)[COUNT].sum()
    most = counts.sort_values(ascending=False, kind="stable").reset_index().drop_duplicates("signature")
    return dict(zip(most["signature"].tolist(), most["value"].tolist(), strict=True))


def _observed_input_sets(signature: Signature, observed: Sequence[Observed]) -> tuple[Signature, ...]:
    input_sets = (input_set_of(signature, other) for other in observed[:MOST_INPUT_SETS])
    return tuple(input_set for input_set in input_sets if input_set is not None)


def values_of(signatures: Sequence[Signature], values: Mapping[int, Drawable]) -> dict[int, Drawable]:
    used = {}
    for spec in (spec for signature in signatures for spec in tensors([signature.args, signature.kwargs])):
        for number in value_numbers(spec):
            if number is not None and number in values:
                item = values[number]
                used[number] = item.laid_out(spec) if isinstance(item, Stored) and number == spec.values else item
    return used
