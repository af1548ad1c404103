"""Cases: the things to replay, made of a trace's signatures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import pandas as pd

from opgrip.replay.arguments.stored import Stored, drawn_values
from opgrip.replay.cases.selection import Selection
from opgrip.replay.operators.lookup import Operator
from opgrip.replay.operators.memory import LARGE, bytes_of, mostly_fresh
from opgrip.traces import Trace
from opgrip.traces.arguments import numbers_of, tensors, with_numbers
from opgrip.traces.errors import UserError
from opgrip.traces.records import Observed, Signature
from opgrip.traces.suggestions import nearest
from opgrip.traces.tensor_specs import value_numbers
from opgrip.traces.values import Drawable

MOST_VARIANTS = 8
"""Calls of a signature, beside the first, whose values are drawn too."""

NO_CALLS = "the trace holds no calls", "capture a program that runs some"
ALL_EXCLUDED = ("--exclude-op leaves no case", "exclude fewer")
NO_CALL_MATCHES_BOTH = "no call matches both --op and --module", "see opgrip trace info"
NO_CALL_WITHIN = "no call that --op and --module select is within --label", "see opgrip trace info"
"""What is wrong with a selection, and what to do."""


@dataclass(frozen=True, slots=True)
class Case:
    """One signature and how often it was called.

    Attributes
    ----------
    values : the value models that the signature's tensors refer to, or the values themselves
    count : calls that were selected
    captured_us : median duration of those calls in the program
    captured_total_us : sum of their durations
    share : of the selected calls' time, each of them taken to last `captured_us`, 0 to 1
    context : the settings that most of those calls ran under
    phase : the one that most of those calls were in
    variants : the signature with the values and results of others of its calls, where the trace has them
    fresh : share of those calls whose results got fresh memory, 0 to 1; None where it does not matter or is not known
    operator : what it calls, where that is not the operator that the signature names
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
    fresh: float | None = None
    operator: Operator | None = None

    @property
    def number(self) -> int:
        """The signature's number."""
        return self.signature.number

    @property
    def op(self) -> str:
        """The operator's name."""
        return self.signature.op


def make_cases(trace: Trace, selection: Selection = Selection()) -> list[Case]:
    """One case a signature, by falling share of time.

    Calls that an extension function made inside are its own: replaying the function runs them. A gripped function is
    there as the calls that it made.

    Raises
    ------
    UserError : where a pattern selects nothing
    """
    calls = trace.own_calls
    if calls.empty:
        raise UserError(*NO_CALLS)
    calls = _matching(calls, "op", selection.op, "--op")
    calls = _matching(calls, "module", selection.module, "--module")
    if calls.empty:
        raise UserError(*NO_CALL_MATCHES_BOTH)
    calls = calls[~calls["op"].isin([name for name in calls["op"].cat.categories if selection.excludes(name)])]
    if calls.empty:
        raise UserError(*ALL_EXCLUDED)
    calls = calls.loc[calls.index.intersection(labeled_calls(trace, selection))]
    if calls.empty:
        raise UserError(*NO_CALL_WITHIN)
    times = calls.groupby("signature")["duration_ns"].agg(["size", "median", "sum"])
    of_signature = {int(row[0]): (int(row[1]), float(row[2]), int(row[3])) for row in times.itertuples()}
    total = max(sum(count * median for count, median, _ in of_signature.values()), 1.0)
    contexts = contexts_of(trace, calls)
    fresh = _shares_of_fresh(trace, calls)
    phases = _most_frequent(calls["signature"], calls["phase"])
    drawn = drawn_values(trace)
    cases = []
    for signature in trace.signatures:
        if signature.number in of_signature:
            count, median_ns, sum_ns = of_signature[signature.number]
            variants = _variants(signature, trace.observed.get(signature.number, ()))
            cases.append(
                Case(
                    signature,
                    values_of((signature, *variants), drawn),
                    *(count, median_ns / 1e3, sum_ns / 1e3, count * median_ns / total),
                    context=contexts.get(signature.number, {}),
                    phase=phases.get(signature.number, "forward"),
                    variants=variants,
                    fresh=fresh.get(signature.number),
                )
            )
    if not cases:
        raise UserError("no call of the trace refers to a signature that it holds", "capture it again")
    cases.sort(key=lambda case: (-case.share, case.number))
    return cases[: selection.top]


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
    """The calls of a trace's table that ran within the labels that are selected.

    Raises
    ------
    UserError : where the program has no such label
    """
    patterns = selection.label
    if not patterns:
        return trace.calls.index
    labels = trace.labels
    if not any(matches(str(label), patterns) for label in labels.index):
        raise _no_match("label", patterns, "--label", [str(label) for label in labels.index])
    return trace.calls.index[trace.within_labels(lambda label: matches(label, patterns))]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of some patterns, as shells match file names; no patterns are met by all."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def no_match(names: pd.Series[Any], patterns: Sequence[str], flag: str) -> UserError:
    """That patterns select none of the names that calls have, with those of them that come nearest."""
    return _no_match(str(names.name), patterns, flag, names.dropna().unique())


def _no_match(what: str, patterns: Sequence[str], flag: str, names: Iterable[Any]) -> UserError:
    problem = f"no {what} matches {flag} {' '.join(patterns)}"
    distinct = sorted({str(name) for name in names} - {""})
    if not distinct:
        return UserError(problem, f"the trace names no {what}")
    near = nearest(patterns[0], distinct)
    others = " and others" if len(distinct) > len(near) else ""
    return UserError(problem, f"the trace has {', '.join(map(repr, near))}{others}")


def contexts_of(trace: Trace, calls: pd.DataFrame) -> dict[int, Mapping[str, Any]]:
    """By signature, the settings that most of its calls ran under."""
    context_of = {scope.number: scope.context for scope in trace.scopes}
    contexts = _most_frequent(calls["signature"], calls["scope"].map(context_of))
    return {signature: trace.contexts.get(int(number), {}) for signature, number in contexts.items()}


def _most_frequent(signatures: pd.Series[int], values: pd.Series[Any]) -> dict[int, Any]:
    """By signature, what most of its calls have, of those of which it is known; of as many, the one met first."""
    pairs = pd.DataFrame({"signature": signatures, "value": values}).dropna()
    counts = pairs.groupby(["signature", "value"], sort=False, observed=True).size()
    most = counts.sort_values(ascending=False, kind="stable").reset_index().drop_duplicates("signature")
    return dict(zip(most["signature"].tolist(), most["value"].tolist(), strict=True))


def _shares_of_fresh(trace: Trace, calls: pd.DataFrame) -> dict[int, float]:
    """By signature with large results, the share of its calls that got them in fresh memory."""
    page = trace.header.get("page_size")
    if type(page) is not int or page <= 0:
        return {}
    size = {signature.number: bytes_of(signature.outputs) for signature in trace.signatures}
    results = calls["signature"].map(size).fillna(0)
    large = calls[results >= LARGE]
    fresh = mostly_fresh(large["page_faults"] * float(page), results[large.index])
    shares = fresh.groupby(large["signature"]).mean()
    return dict(zip(shares.index.tolist(), shares.tolist(), strict=True))


def _variants(signature: Signature, observed: Sequence[Observed]) -> tuple[Signature, ...]:
    """A signature as its later calls had it."""
    count = len(numbers_of([signature.args, signature.kwargs]))
    variants = []
    for other in observed[:MOST_VARIANTS]:
        if len(other.values) == count:
            args, kwargs = with_numbers((signature.args, signature.kwargs), other.values)
            variants.append(replace(signature, args=args, kwargs=kwargs, outputs=other.outputs))
    return tuple(variants)


def values_of(signatures: Sequence[Signature], values: Mapping[int, Drawable]) -> dict[int, Drawable]:
    """What the tensors among signatures' arguments are drawn from, by number."""
    used = {}
    for spec in (spec for signature in signatures for spec in tensors([signature.args, signature.kwargs])):
        for number in value_numbers(spec):
            if number is not None and number in values:
                item = values[number]
                used[number] = item.laid_out(spec) if isinstance(item, Stored) and number == spec.values else item
    return used
