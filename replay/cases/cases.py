"""Cases: the calls to replay, made from a trace's signatures."""

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

MOST_INPUT_SETS = 8
"""maximum number of input sets of a case in addition to the first one"""


@dataclass(frozen=True, slots=True)
class Case:
    """A case: a signature, or one timing cluster of it, with everything needed to replay its calls.

    A timing cluster is a group of calls of one signature whose times differ from those of the other calls.

    values : value models of the signature's tensors, or the values themselves
    captured_us : median time of the calls in the program: device time if they ran on a device, else host time
    captured_host_us : median host time, if `captured_us` is a device time
    captured_spread : interquartile range of the calls' times, relative to their median; None for one call, and for
        times that are estimated parts of a graph's launches
    perturbed : number of calls that ran right after the capture's own work; they count like other calls
    share : share of the time of all selected calls, with `captured_us` for each call
    context : torch settings under which most calls ran
    phase : phase in which most calls ran
    input_sets : further input sets: the signature with values and results of later calls
    timing_clusters : the timing cluster of the signature and of each input set; empty if input sets are equally
    frequent
    fresh : share of calls whose results were in new pages; None if unknown or irrelevant
    operator : the operator to call, if it differs from the signature's
    reference : the operator whose results are the reference under every mode; None for the case itself under the
    reference mode
    unused : indices of results that the program does not use (see `with_unused_results`)
    part_of : number of the signature in the trace, if the case is one timing cluster of that signature
    load : function that completes the case in the process that runs it; None if it is complete
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
        """Number of the case: the number of its signature or, for a timing cluster, a number that no signature has."""
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
        """Key of the case, which is the same in all traces."""
        key = key_of_case(self.signature, self.context)
        return key if self.part_of is None else key_of_part(key, *(item.place for item in self.timing_clusters))


def make_cases(
    trace: Trace, selection: Selection = Selection(), with_preceding_calls: bool = False, in_order: bool = False
) -> list[Case]:
    """Return one case per signature, largest share of time first.

    Calls inside an extension function are part of that function; a gripped function is represented by the calls that it
    made. Preceding calls of a distilled trace are left out.
    with_preceding_calls : True to include the preceding calls of a distilled trace
    in_order : True to keep the order of signatures if no call has a time
    Raises `UserError` if a pattern selects nothing.
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
    """Return one row per distinct call; for the signatures in `looked_at`, one row per call.

    Rows of single calls keep the call's index. If `looked_at` is a sample of the calls, each of them counts several
    times.
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
    """The calls that become one case: those of a signature, or of one timing cluster of it.

    number : number of the signature in the trace
    signature : copy of the signature whose number is the number of the case
    calls : indices of the case's calls; None for all calls of the signature
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
    """Return the most frequent torch settings of each signature's calls."""
    context_of = {scope.number: scope.context for scope in trace.scopes}
    contexts = _most_frequent(calls, calls["scope"].map(context_of))
    return {signature: trace.contexts.get(int(number), {}) for signature, number in contexts.items()}


def _most_frequent(calls: pd.DataFrame, values: pd.Series[Any]) -> dict[int, Any]:
    """Return the most frequent known value of each signature's calls; the first one if several are equally frequent."""
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
