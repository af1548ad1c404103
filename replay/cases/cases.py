"""Cases: the things to replay, made from a trace's signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import count
from typing import Any

import pandas as pd

from opgrip.cli.suggestions import nearest
from opgrip.errors import NothingSelectedError, UserError
from opgrip.replay.cases.call_sites import CallSite, count_call_sites
from opgrip.replay.cases.estimates import estimated_cost
from opgrip.replay.cases.flow import shares_of_fresh
from opgrip.replay.cases.selection import Selection
from opgrip.replay.cases.timing_clusters import (
    COLUMNS,
    Behaviour,
    PlacedCalls,
    calls_looked_at,
    calm_times,
    placed_calls,
    variant_of,
)
from opgrip.replay.inputs.filling import Stored, drawn_values
from opgrip.replay.operators.lookup import Operator
from opgrip.traces import Trace
from opgrip.traces.codec.record_forms import key_of_case, key_of_part
from opgrip.traces.schema.arguments import tensors
from opgrip.traces.schema.records import Observed, Signature
from opgrip.traces.schema.tensor_specs import value_numbers
from opgrip.traces.table.call_table import COUNT, counts_of, quantiles
from opgrip.traces.table.profiler_labels import own_calls
from opgrip.traces.table.unconverted import no_calls
from opgrip.traces.values import Drawable
from opgrip.traces.zoo.manifest import chosen_numbers

MOST_VARIANTS = 8
"""Input sets of a case, besides the first one."""

ALL_EXCLUDED = ("--exclude-op leaves no case", "exclude fewer")
NO_CALL_MATCHES_BOTH = "no call matches both --op and --module", "see opgrip trace info"
NO_CALL_WITHIN = "no call that --op and --module select is within --label", "see opgrip trace info"


@dataclass(frozen=True, slots=True)
class Case:
    """One signature and how often it was called.

    values : value models of the signature's tensors, or the values themselves
    captured_us : median time of the calls in the program, on the device if they worked on one
    captured_host_us : median time on the host, if `captured_us` is of a device
    captured_spread : interquartile range of the calls' times, relative to their median
    perturbed : number of calls that ran right after the capture's own work; they count like the others
    share : share of the selected calls' time if each takes `captured_us`
    context : settings that most calls ran under
    phase : phase that most calls ran in
    variants : the signature with the values and results of others of its calls
    behaviours : the timing cluster of the signature and of each input set; empty if all are as frequent
    fresh : share of calls whose results were on new pages; None if unknown or irrelevant
    operator : what the case calls, if the signature does not name it
    reference : what to compare results with under every mode; None for the case itself under the reference mode
    unused : indices of results that the program does not use, see `with_unused`
    part_of : number of the trace's signature, if the case is one timing cluster of it
    load : completes the case in the process that runs it; None if it is complete
    """

    signature: Signature
    values: Mapping[int, Drawable]
    count: int
    captured_us: float
    captured_total_us: float
    share: float
    context: Mapping[str, Any] = field(default_factory=dict)
    phase: str = "forward"
    variants: Sequence[Signature] = ()
    behaviours: Sequence[Behaviour] = ()
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
        """Number of the case: that of its signature, or for a timing cluster one that no signature has."""
        return self.signature.number

    @property
    def trace_number(self) -> int:
        """Number by which the trace's calls refer to the signature."""
        return self.number if self.part_of is None else self.part_of

    @property
    def op(self) -> str:
        return self.signature.op

    @property
    def key(self) -> str:
        """Identity of the case in any trace."""
        key = key_of_case(self.signature, self.context)
        return key if self.part_of is None else key_of_part(key, *(item.place for item in self.behaviours))


def make_cases(
    trace: Trace, selection: Selection = Selection(), with_surroundings: bool = False, in_order: bool = False
) -> list[Case]:
    """Return one case per signature, by falling share of time.

    Calls inside an extension function are part of that function; a gripped function is represented by the calls that it
    made. Preceding calls of a distilled trace are left out.
    with_surroundings : make cases of a distilled trace's preceding calls too
    in_order : without times, keep the order of the signatures
    Raises `UserError` if a pattern selects nothing.
    """
    looked_at = calls_looked_at(trace)
    placed = placed_calls(trace, looked_at)
    if selection.label:
        calls = trace.own_calls.assign(**{COUNT: 1})
    else:
        calls = _with_single(trace.own_distinct_calls, looked_at)
    chosen = None if with_surroundings else chosen_numbers(trace.header)
    if chosen is not None:
        calls = calls[calls["signature"].isin(chosen)]
    if calls.empty:
        raise no_calls(trace)
    calls = _selected(calls, trace, selection)
    kinds = list(_kinds(trace, placed, calls.index, selection.split))
    numbers = _numbers_of_cases(calls, kinds)
    captured, call_sites = _captured(calls, numbers, kinds), count_call_sites(calls, numbers)
    weights = _weights(captured, {} if in_order else {kind.signature.number: kind.signature for kind in kinds})
    total = max(sum(weights.values()), 1.0)
    contexts = contexts_of(trace, calls)
    fresh = shares_of_fresh(trace, calls)
    phases = _most_frequent(calls, calls["phase"])
    drawn = drawn_values(trace)
    cases = []
    for kind in kinds:
        times, number = captured.get(kind.signature.number), kind.number
        if times is not None:
            cases.append(
                Case(
                    kind.signature,
                    values_of((kind.signature, *kind.variants), drawn),
                    *(times.count, times.median_us, times.total_us, weights[kind.signature.number] / total),
                    context=contexts.get(number, {}),
                    phase=phases.get(number, "forward"),
                    call_sites=call_sites.get(kind.signature.number, ()),
                    variants=kind.variants,
                    behaviours=kind.behaviours,
                    fresh=fresh.get(number),
                    captured_host_us=times.host_us,
                    captured_spread=times.spread,
                    perturbed=times.perturbed,
                    part_of=number if number != kind.signature.number else None,
                )
            )
    if not cases:
        raise UserError("no call of the trace refers to a signature that it holds", "capture it again")
    cases.sort(key=lambda case: (-case.share, case.number))
    return cases[: selection.top]


def _with_single(distinct: pd.DataFrame, looked_at: pd.DataFrame) -> pd.DataFrame:
    """Return one row for equal calls, but one row per call for the signatures in `looked_at`, under the call's own
    index. If `looked_at` is a sample, each of its calls counts for several.
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
    """What becomes a case: a signature, or one timing cluster of it.

    number : number of the signature in the trace
    signature : with the number of the case
    calls : indices of its calls; None for all calls of the signature
    """

    number: int
    signature: Signature
    variants: tuple[Signature, ...] = ()
    behaviours: tuple[Behaviour, ...] = ()
    calls: pd.Index[int] | None = None


def _kinds(trace: Trace, placed: Mapping[int, PlacedCalls], selected: pd.Index[int], split: bool) -> Iterator[_Kind]:
    numbers = count(max((signature.number for signature in trace.signatures), default=0) + 1)
    for signature in trace.signatures:
        number = signature.number
        observed: Sequence[Observed] = trace.observed.get(number, ())
        behaviours: list[Behaviour] = []
        if number in placed:
            observed, behaviours = placed[number].observed_in(selected), placed[number].behaviours(selected)
        # numbers do not depend on what is selected
        alone = [replace(item.signature, number=next(numbers)) for item in behaviours] if split else []
        present = [item for item in behaviours if len(item.calls)]
        if split and present:
            for item, part in zip(behaviours, alone, strict=True):
                yield _Kind(number, part, behaviours=(item,), calls=item.calls)
        elif present:
            present.sort(key=lambda item: -len(item.calls))
            first, *others = (item.signature for item in present)
            yield _Kind(number, first, tuple(others), tuple(present))
        else:
            yield _Kind(number, signature, _variants(signature, observed))


def _numbers_of_cases(calls: pd.DataFrame, kinds: Iterable[_Kind]) -> pd.Series[int]:
    numbers = calls["signature"].copy()
    for kind in kinds:
        if kind.calls is not None:
            numbers[kind.calls] = kind.signature.number
    return numbers


def _selected(calls: pd.DataFrame, trace: Trace, selection: Selection) -> pd.DataFrame:
    calls = _matching(calls, "op", selection.op, "--op")
    calls = _matching(calls, "module", selection.module, "--module")
    if calls.empty:
        raise NothingSelectedError(*NO_CALL_MATCHES_BOTH)
    calls = calls[~calls["op"].isin([name for name in calls["op"].cat.categories if selection.excludes(name)])]
    if calls.empty:
        raise NothingSelectedError(*ALL_EXCLUDED)
    if selection.label:
        calls = calls.loc[calls.index.intersection(labeled_calls(trace, selection))]
    if calls.empty:
        raise NothingSelectedError(*NO_CALL_WITHIN)
    return calls


def _matching(calls: pd.DataFrame, column: str, patterns: Sequence[str], flag: str) -> pd.DataFrame:
    if not patterns:
        return calls
    names = calls[column].cat.categories
    matched = [name for name in names if matches(name, patterns)]
    selected = calls[calls[column].isin(matched)]
    if selected.empty:
        raise no_match(calls[column], patterns, flag)
    return selected


def labeled_calls(trace: Trace, selection: Selection) -> pd.Index[int]:
    """Return the calls within the selected labels; raise `UserError` if the program has no such label."""
    patterns = selection.label
    if not patterns:
        return trace.calls.index
    labels = trace.labels
    if not any(matches(str(label), patterns) for label in labels.index):
        raise _no_match("label", patterns, "--label", [str(label) for label in labels.index])
    return trace.calls.index[trace.within_labels(lambda label: matches(label, patterns))]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a name matches one of the shell patterns, or if there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def no_match(names: pd.Series[Any], patterns: Sequence[str], flag: str) -> NothingSelectedError:
    """Return the error that no name matches, with the nearest names."""
    return _no_match(str(names.name), patterns, flag, names.dropna().unique())


def _no_match(what: str, patterns: Sequence[str], flag: str, names: Iterable[Any]) -> NothingSelectedError:
    problem = f"no {what} matches {flag} {' '.join(patterns)}"
    distinct = sorted({str(name) for name in names} - {""})
    if not distinct:
        return NothingSelectedError(problem, f"the trace names no {what}")
    near = nearest(patterns[0], distinct)
    others = " and others" if len(distinct) > len(near) else ""
    return NothingSelectedError(problem, f"the trace has {', '.join(map(repr, near))}{others}")


def contexts_of(trace: Trace, calls: pd.DataFrame) -> dict[int, Mapping[str, Any]]:
    """Return the most frequent settings by signature."""
    context_of = {scope.number: scope.context for scope in trace.scopes}
    contexts = _most_frequent(calls, calls["scope"].map(context_of))
    return {signature: trace.contexts.get(int(number), {}) for signature, number in contexts.items()}


def _most_frequent(calls: pd.DataFrame, values: pd.Series[Any]) -> dict[int, Any]:
    """Return the most frequent known value by signature; of equally frequent ones, the first."""
    pairs = pd.DataFrame({"signature": calls["signature"], "value": values, COUNT: counts_of(calls)}).dropna()
    counts = pairs.groupby(["signature", "value"], sort=False, observed=True)[COUNT].sum()
    most = counts.sort_values(ascending=False, kind="stable").reset_index().drop_duplicates("signature")
    return dict(zip(most["signature"].tolist(), most["value"].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class _Captured:
    """Times of a signature's calls; see `Case`."""

    count: int
    median_us: float
    total_us: float
    host_us: float | None
    spread: float | None
    perturbed: int


def _captured(calls: pd.DataFrame, numbers: pd.Series[int], kinds: Iterable[_Kind]) -> dict[int, _Captured]:
    behaviours = [item for kind in kinds for item in kind.behaviours]
    calm, counts = calm_times(calls), calls[COUNT]
    of_case = calls.groupby(numbers)
    median = quantiles(_times_of(calls, calm, behaviours), numbers, counts)
    # one way to behave is not scattered because there is another
    typical = numbers.map(median)
    for behaviour in behaviours:
        typical[behaviour.calls] = behaviour.captured_us * 1e3
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
    return {int(number): _Captured(*row) for number, row in zip(median.index, rows, strict=True)}


def _weights(captured: Mapping[int, _Captured], signatures: Mapping[int, Signature]) -> dict[int, float]:
    """Return the time of each case's calls; if no call has a time, their estimated cost, if there are signatures."""
    times = {number: item.count * item.median_us for number, item in captured.items()}
    if any(times.values()):
        return times
    costs = {number: estimated_cost(signature) for number, signature in signatures.items() if number in captured}
    return {number: item.count * costs.get(number, 1.0) for number, item in captured.items()}


def _times_of(calls: pd.DataFrame, calm: pd.Series[float], behaviours: Iterable[Behaviour]) -> pd.Series[float]:
    """Return the time of each call in ns. A perturbed call gets the time of its timing cluster."""
    times = calls["time_ns"].astype(float)
    for behaviour in behaviours:
        own = calm[behaviour.calls]
        typical_ns = own.median() if own.notna().any() else behaviour.captured_us * 1e3
        times[behaviour.calls] = own.fillna(typical_ns)
    return times


def _or_none(values: pd.Series[float], is_known: pd.Series[bool]) -> pd.Series[Any]:
    return values.astype(object).where(is_known, None)


def _variants(signature: Signature, observed: Sequence[Observed]) -> tuple[Signature, ...]:
    variants = (variant_of(signature, other) for other in observed[:MOST_VARIANTS])
    return tuple(variant for variant in variants if variant is not None)


def values_of(signatures: Sequence[Signature], values: Mapping[int, Drawable]) -> dict[int, Drawable]:
    used = {}
    for spec in (spec for signature in signatures for spec in tensors([signature.args, signature.kwargs])):
        for number in value_numbers(spec):
            if number is not None and number in values:
                item = values[number]
                used[number] = item.laid_out(spec) if isinstance(item, Stored) and number == spec.values else item
    return used
