"""Cases, the units of replay, and the captured times of their calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from opgrip.errors import UserError
from opgrip.replay.cases.call_sites import CallSite, count_call_sites
from opgrip.replay.cases.flow import shares_of_fresh
from opgrip.replay.cases.selection import Selection, no_calls, select_calls
from opgrip.replay.inputs.filling import Stored, drawn_values
from opgrip.replay.operators.lookup import Operator, Unsupported, find_operator, is_view
from opgrip.replay.operators.memory import bytes_of
from opgrip.replay.operators.work import work_of
from opgrip.traces import Trace
from opgrip.traces.codec.record_forms import key_of_case, key_of_part
from opgrip.traces.schema.arguments import TensorSpec, map_leaves, numbers_of, tensors, with_numbers
from opgrip.traces.schema.records import NO_STORAGE, Observed, Signature
from opgrip.traces.schema.tensor_specs import value_numbers
from opgrip.traces.table.call_table import COUNT, counts_of, quantiles
from opgrip.traces.table.profiler_labels import own_calls
from opgrip.traces.values import Drawable
from opgrip.traces.zoo.manifest import chosen_numbers

MOST_INPUT_SETS = 8  # maximum number of input sets of a case in addition to the first one


@dataclass(frozen=True, slots=True)
class Case:
    """One unit of replay, such as the calls of one signature, a module, a function or a sample.

    captured_us : median time of a call in the program: device time if the calls ran on a device, else host time
    share : share of the time of all selected calls, from 0 to 1
    context : torch settings, such as autocast, under which the calls ran most often
    input_sets : copies of the signature with the values and results of other calls
    weights : indices of tensor arguments that no call of the program makes or writes
    storages : of a subgraph, the number of its first call in each run, and the storages of its tensor arguments then
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
    weights: frozenset[int] = frozenset()
    part_of: int | None = None
    call_sites: Sequence[CallSite] = ()
    load: Callable[[int], Case] | None = None
    storages: Sequence[tuple[int, tuple[int, ...]]] = ()

    @property
    def number(self) -> int:
        return self.signature.number

    @property
    def trace_number(self) -> int:
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
    """Return the cases of a trace's calls, largest share of time first.

    with_preceding_calls : True to include calls that a distilled trace contains only because they precede its cases
    """
    observed_calls = calls_at_several_sites(trace)
    placed = placed_calls(trace, observed_calls)
    if selection.label:
        calls = trace.own_calls.assign(**{COUNT: 1})
    else:
        calls = _with_single(trace.own_distinct_calls, observed_calls)
    chosen = None if with_preceding_calls else chosen_numbers(trace.header)
    if chosen is not None:
        calls = calls[calls["signature"].isin(chosen)]
    if calls.empty:
        raise no_calls(trace)
    calls = select_calls(calls, trace, selection)
    kinds = list(_kinds(trace, placed, calls.index, selection.split))
    cases = _cases(trace, calls, kinds, in_order)
    if not cases:
        raise UserError("the trace lacks the signatures of its calls", "capture the program again")
    cases.sort(key=lambda case: (-case.share, 0 if in_order else case.number))
    return cases[: selection.top]


def _cases(trace: Trace, calls: pd.DataFrame, kinds: Sequence[_Kind], in_order: bool) -> list[Case]:
    numbers = calls["signature"].copy()
    for kind in kinds:
        if kind.calls is not None:
            numbers[kind.calls] = kind.signature.number
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


def _with_single(distinct: pd.DataFrame, observed_calls: pd.DataFrame) -> pd.DataFrame:
    if observed_calls.empty:
        return distinct
    single = own_calls(observed_calls)
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
    number: int  # of the signature in the trace; that of `signature` is the case's
    signature: Signature
    input_sets: tuple[Signature, ...] = ()
    timing_clusters: tuple[TimingCluster, ...] = ()
    calls: pd.Index[int] | None = None  # None for all calls of the signature


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
            input_sets = (input_set_of(signature, other) for other in observed[:MOST_INPUT_SETS])
            yield _Kind(number, signature, tuple(item for item in input_sets if item is not None))


def contexts_of(trace: Trace, calls: pd.DataFrame) -> dict[int, Mapping[str, Any]]:
    context_of = {scope.number: scope.context for scope in trace.scopes}
    contexts = _most_frequent(calls, calls["scope"].map(context_of))
    return {signature: trace.contexts.get(int(number), {}) for signature, number in contexts.items()}


def _most_frequent(calls: pd.DataFrame, values: pd.Series[Any]) -> dict[int, Any]:
    pairs = pd.DataFrame({"signature": calls["signature"], "value": values, COUNT: counts_of(calls)}).dropna()
    counts = pairs.groupby(["signature", "value"], sort=False, observed=True)[COUNT].sum()
    most = counts.sort_values(ascending=False, kind="stable").reset_index().drop_duplicates("signature")
    return dict(zip(most["signature"].tolist(), most["value"].tolist(), strict=True))


def values_of(signatures: Sequence[Signature], values: Mapping[int, Drawable]) -> dict[int, Drawable]:
    used = {}
    for spec in (spec for signature in signatures for spec in tensors([signature.args, signature.kwargs])):
        for number in value_numbers(spec):
            if number is not None and number in values:
                item = values[number]
                used[number] = item.laid_out(spec) if isinstance(item, Stored) and number == spec.values else item
    return used


DIFFERENT = 1.5  # minimum ratio between the times of call sites in different clusters
ANY = -1  # storage number of calls whose first storage is not used again
MOST_CALLS = 200_000
MEMORY = "memory"
COLUMNS = [
    *("signature", "op", "kind", "scope", "module", "function", "file", "line", "phase", "inside", "gripped"),
    *("start_ns", "duration_ns", "device_ns", "raw_ns", "time_ns", "perturbed", "page_faults", "slow_memory_ns"),
]


@dataclass(frozen=True, slots=True)
class TimingCluster:
    """Calls of one signature, at one or more call sites, that take similar times."""

    signature: Signature
    calls: pd.Index[int]
    captured_us: float
    place: str


@dataclass(frozen=True, slots=True)
class PlacedCalls:
    signature: Signature
    calls: pd.DataFrame
    sites: NDArray[np.int64]
    typical_ns: NDArray[np.float64]
    observed: Sequence[Observed]
    rows: Sequence[int | None]

    def clusters(self, selected: pd.Index[int]) -> list[TimingCluster]:
        groups = self._groups()
        if len(groups) < 2:
            return []
        times = np.array([self.typical_ns[group[0][0]] for group in groups])
        nearest = np.abs(np.log(self.typical_ns)[:, None] - np.log(times)[None, :]).argmin(axis=1)
        order = sorted(range(len(groups)), key=lambda index: -int((nearest == index).sum()))
        return [self._behaviour(groups[index], nearest == index, selected) for index in order]

    def observed_in(self, selected: pd.Index[int]) -> list[Observed]:
        sites = set(self.sites[self.calls.index.isin(selected)].tolist())
        return [
            item
            for item, row in zip(self.observed, self.rows, strict=True)
            if item.since_ns is None or (row is not None and int(self.sites[row]) in sites)
        ]

    def _groups(self) -> list[list[tuple[int, Signature]]]:
        examples = [
            (row, input_set)
            for item, row in zip(self.observed, self.rows, strict=True)
            if row is not None and (input_set := input_set_of(self.signature, item)) is not None
        ]
        groups: list[list[tuple[int, Signature]]] = []
        for example in sorted(examples, key=lambda example: (float(self.typical_ns[example[0]]), example[0])):
            if groups and self.typical_ns[example[0]] < DIFFERENT * self.typical_ns[groups[-1][0][0]]:
                groups[-1].append(example)
            else:
                groups.append([example])
        return groups

    def _behaviour(
        self, examples: Sequence[tuple[int, Signature]], alike: NDArray[np.bool_], selected: pd.Index[int]
    ) -> TimingCluster:
        is_selected = self.calls.index.isin(selected)
        sites = set(self.sites[is_selected].tolist())
        # prefer values of a selected call site to values of another one in the same cluster
        row, input_set = next((item for item in examples if int(self.sites[item[0]]) in sites), examples[0])
        one = self.calls.iloc[row]
        place = f"{one['module']} {one['function']} {one['file']}:{one['line']}"
        own = alike & is_selected
        median_us = float(np.median(self.typical_ns[own if own.any() else alike])) / 1e3
        return TimingCluster(input_set, self.calls.index[own], median_us, place.strip())


def calls_at_several_sites(trace: Trace) -> pd.DataFrame:
    numbers = list(_observed_at_several_sites(trace))
    tables = [pd.DataFrame({name: [] for name in [*COLUMNS, MEMORY]})]
    if numbers:
        distinct = trace.distinct_calls
        all_calls = int(distinct.loc[distinct["signature"].isin(numbers), COUNT].sum())
        tables = list(_pieces(trace.call_parts(), numbers, all_calls))
    return pd.concat(tables)


def _pieces(
    parts: Iterable[tuple[pd.DataFrame, NDArray[np.int64]]], numbers: Collection[int], all_calls: int
) -> Iterator[pd.DataFrame]:
    read_calls = piece_calls = 0
    for part, storages in parts:
        own = part[part["signature"].isin(numbers)]
        # half of the limit is for the beginning
        if all_calls <= MOST_CALLS or piece_calls <= MOST_CALLS / 2 * (1 + read_calls / all_calls):
            yield own[COLUMNS].assign(**{MEMORY: _first_memory(own, storages)})
            piece_calls += len(own)
        read_calls += len(own)


def placed_calls(trace: Trace, calls: pd.DataFrame) -> dict[int, PlacedCalls]:
    signatures, observed = (
        {signature.number: signature for signature in trace.signatures},
        _observed_at_several_sites(trace),
    )
    placed: dict[int, PlacedCalls] = {}
    for name, own in calls.groupby("signature"):
        number = int(str(name))
        own = own.sort_values("start_ns", kind="stable")
        memory = own[MEMORY].to_numpy()
        sites, typical_ns = _sites(own, memory)
        rows = list(_rows(observed[number], own["start_ns"].to_numpy(), memory))
        placed[number] = PlacedCalls(signatures[number], own, sites, typical_ns, observed[number], rows)
    return placed


def _observed_at_several_sites(trace: Trace) -> dict[int, list[Observed]]:
    numbers = {signature.number for signature in trace.signatures}
    return {
        number: items
        for number, items in trace.observed.items()
        if number in numbers and any(item.since_ns is not None for item in items)
    }


def input_set_of(signature: Signature, observed: Observed) -> Signature | None:
    if len(numbers_of([signature.args, signature.kwargs])) != len(observed.values):
        return None
    args, kwargs = with_numbers((signature.args, signature.kwargs), observed.values)
    return replace(signature, args=args, kwargs=kwargs, outputs=observed.outputs)


def _rows(observed: Sequence[Observed], starts: NDArray[np.int64], memory: NDArray[np.int64]) -> Iterator[int | None]:
    for item in observed:
        if item.since_ns is None:
            yield None
            continue
        candidates = starts >= item.since_ns
        if item.storage is not None:
            # other threads, and other processes in a merged trace, can start a call in between
            candidates &= memory == item.storage
        yield int(candidates.argmax()) if candidates.any() else None


def _first_memory(calls: pd.DataFrame, storages: NDArray[np.int64]) -> NDArray[np.int64]:
    # the last call may have no tensors, so its index may be one past the end
    padded = np.append(storages, NO_STORAGE)
    return np.where(calls["tensors"] > 0, padded[calls["first_storage"].to_numpy()], NO_STORAGE)


def _sites(calls: pd.DataFrame, memory: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    first = pd.Series(memory, index=calls.index)
    raw_ns = (calls["raw_ns"] - calls["slow_memory_ns"]).astype(float)
    calm_ns = calm_times(calls)
    by_memory = [calls["scope"], first]
    again = raw_ns.groupby(by_memory).transform("size") > 1
    candidates = (
        calm_ns.groupby(by_memory).transform("median").where(again),
        raw_ns.groupby(by_memory).transform("median").where(again),
        calm_ns.groupby(calls["scope"]).transform("median"),
        raw_ns,
    )
    typical = candidates[0]
    for other in candidates[1:]:
        typical = typical.fillna(other)
    sites = calls.groupby([calls["scope"], first.where(again, ANY)]).ngroup()
    return np.asarray(sites, dtype=np.int64), np.asarray(typical.clip(lower=1.0), dtype=np.float64)


def calm_times(calls: pd.DataFrame) -> pd.Series[float]:
    """Return the time of each call in ns; nan if it is a host time that the capture perturbed."""
    return calls["raw_ns"].astype(float).where(~calls["perturbed"] | calls["device_ns"].notna())


FLOPS_PER_BYTE = 10  # assumed floating-point operations per byte moved; 5 to 200 on real accelerators and CPUs


def estimated_cost(signature: Signature) -> float:
    """Return an estimate of a call's cost, from the bytes that it moves and its floating-point operations."""
    if is_view(signature):
        return 1.0
    whole = float(bytes_of([signature.args, signature.kwargs, signature.outputs]))
    try:
        args, kwargs, outputs = map_leaves(_without_memory, (signature.args, signature.kwargs, signature.outputs))
        work = work_of(find_operator(signature).function, signature.op, args, kwargs, outputs)
    except (Unsupported, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError):
        return 1.0 + whole
    moved = whole if work.bytes is None else work.bytes
    return 1.0 + moved + (work.flops or 0) / FLOPS_PER_BYTE


def _without_memory(leaf: Any) -> Any:
    if not isinstance(leaf, TensorSpec):
        return leaf
    if leaf.stride is None or leaf.made_of is not None:
        raise Unsupported("one of its tensors is sparse, quantized or nested")
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class CapturedTimes:
    count: int
    median_us: float
    total_us: float
    host_us: float | None
    spread: float | None
    perturbed: int


def captured_times(
    calls: pd.DataFrame, numbers: pd.Series[int], timing_clusters: Sequence[TimingCluster]
) -> dict[int, CapturedTimes]:
    calm, counts = calm_times(calls), calls[COUNT]
    of_case = calls.groupby(numbers)
    median = quantiles(_times_of(calls, calm, timing_clusters), numbers, counts)
    # the spread is within each timing cluster: a difference between clusters is not noise
    typical = numbers.map(median)
    for cluster in timing_clusters:
        typical[cluster.calls] = cluster.captured_us * 1e3
    undisturbed = calm / typical.clip(lower=1.0)
    low, high = (quantiles(undisturbed, numbers, counts, share) for share in (0.25, 0.75))
    columns = (
        of_case[COUNT].sum(),
        median / 1e3,
        (calls["raw_ns"] * counts).groupby(numbers).sum() / 1e3,
        _or_none(quantiles(calls["duration_ns"], numbers, counts) / 1e3, of_case["device_ns"].count() > 0),
        _or_none(high - low, counts.where(undisturbed.notna(), 0).groupby(numbers).sum() > 1),
        (calls["perturbed"] * counts).groupby(numbers).sum(),
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {int(number): CapturedTimes(*row) for number, row in zip(median.index, rows, strict=True)}


def weights_of(captured: Mapping[int, CapturedTimes], signatures: Mapping[int, Signature]) -> dict[int, float]:
    times = {number: item.count * item.median_us for number, item in captured.items()}
    if any(times.values()):
        return times
    costs = {number: estimated_cost(signature) for number, signature in signatures.items() if number in captured}
    return {number: item.count * costs.get(number, 1.0) for number, item in captured.items()}


def _times_of(
    calls: pd.DataFrame, calm: pd.Series[float], timing_clusters: Iterable[TimingCluster]
) -> pd.Series[float]:
    times = calls["time_ns"].astype(float)
    for cluster in timing_clusters:
        own = calm[cluster.calls]
        typical_ns = own.median() if own.notna().any() else cluster.captured_us * 1e3
        times[cluster.calls] = own.fillna(typical_ns)
    return times


def _or_none(values: pd.Series[float], is_known: pd.Series[bool]) -> pd.Series[Any]:
    return values.astype(object).where(is_known, None)


def shares_of(case: Case) -> list[float]:
    if len(case.timing_clusters) != 1 + len(case.input_sets):
        return []
    counts = [len(item.calls) for item in case.timing_clusters]
    return [number / sum(counts) for number in counts]
