"""Compares two traces: signatures that came and went, how often they are called, their shares, their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opgrip.traces.arguments import TensorSpec, tensors
from opgrip.traces.differences.statistics import changed_statistics, statistics_of
from opgrip.traces.identity import key_of_case
from opgrip.traces.listing import call_outline
from opgrip.traces.records import Signature
from opgrip.traces.trace import Trace
from opgrip.traces.values import ValueModel, value_models

CAME, WENT, COUNTS, SHARES, VALUES = "came", "went", "counts", "shares", "values"
KINDS = (CAME, WENT, COUNTS, SHARES, VALUES)
"""Ways in which signatures differ."""
FACTS = ("opgrip", "torch", "python", "model", "run", "device", "devices", "seed", "steps", "command")
"""Of headers."""


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Differences that do not count.

    Attributes
    ----------
    counts : as a part of the larger of two numbers of calls
    shares : of the whole time, 0 to 1
    values : of the values' spread, or, of shares of zeros, nan and infinities, of all values
    """

    counts: float = 0.0
    shares: float = 0.05
    values: float = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """A signature that one of the traces has, or both.

    Attributes
    ----------
    key : what it is called in any trace
    call : in short, with its arguments
    counts : calls in each
    shares : of the time of each trace, 0 to 1
    median_us : of a call in each; None where it has none
    values : what changed of the values of its tensors: the tensor's place, what, before, after
    kinds : in which ways it differs
    """

    key: str
    op: str
    call: str
    counts: tuple[int, int]
    shares: tuple[float, float]
    median_us: tuple[float | None, float | None]
    values: tuple[tuple[int, str, Any, Any], ...] = ()
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between two traces.

    Attributes
    ----------
    names : of the two
    facts : of their headers that differ: the name, and what each says
    rows : all signatures, those first that changed by most of the time
    """

    names: tuple[str, str]
    facts: list[tuple[str, Any, Any]]
    rows: list[Row]

    def of_kind(self, kind: str) -> list[Row]:
        """The rows that differ so."""
        return [row for row in self.rows if kind in row.kinds]

    @property
    def changed(self) -> list[Row]:
        """The rows that differ in any way."""
        return [row for row in self.rows if row.kinds]

    def as_json(self) -> dict[str, Any]:
        """What a file of a difference holds."""
        return {
            "traces": list(self.names),
            "facts": [{"name": name, "a": one, "b": other} for name, one, other in self.facts],
            "counts": {kind: len(self.of_kind(kind)) for kind in KINDS},
            "signatures": [
                {
                    "key": row.key,
                    "op": row.op,
                    "call": row.call,
                    "kinds": list(row.kinds),
                    "counts": list(row.counts),
                    "shares": list(row.shares),
                    "median_us": list(row.median_us),
                    "values": [
                        {"tensor": place, "statistic": name, "a": one, "b": other}
                        for place, name, one, other in row.values
                    ],
                }
                for row in self.rows
            ],
        }


@dataclass(slots=True)
class _Side:
    """Signatures of one trace that have the same key."""

    signatures: list[Signature] = field(default_factory=list)
    count: int = 0
    share: float = 0.0
    times_us: list[tuple[float, int]] = field(default_factory=list)

    @property
    def median_us(self) -> float | None:
        # of several, that of the one with most calls
        return max(self.times_us, key=lambda item: item[1])[0] if self.times_us else None


def compare_traces(
    before: Trace, after: Trace, names: tuple[str, str], tolerances: Tolerances = Tolerances()
) -> Difference:
    """What differs between two traces."""
    sides = _sides(before), _sides(after)
    rows = [
        _row(key, tuple(side.get(key, _Side()) for side in sides), (before, after), tolerances)  # type: ignore[arg-type]
        for key in dict.fromkeys((*sides[0], *sides[1]))
    ]
    rows.sort(key=lambda row: (not row.kinds, -abs(row.shares[1] - row.shares[0]), -max(row.shares), row.key))
    return Difference(names, list(_facts(before.header, after.header)), rows)


def _facts(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in FACTS:
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


def _sides(trace: Trace) -> dict[str, _Side]:
    calls = trace.own_calls
    groups = calls.groupby("signature")
    counts, medians = groups.size(), groups["time_ns"].median()
    totals = counts * medians if medians.any() else counts.astype(float)
    whole = max(float(totals.sum()), 1e-9)
    contexts = _contexts(trace)
    sides: dict[str, _Side] = {}
    for signature in trace.signatures:
        number = signature.number
        if number not in counts.index:
            continue
        side = sides.setdefault(key_of_case(signature, contexts.get(number, {})), _Side())
        side.signatures.append(signature)
        side.count += int(counts[number])
        side.share += float(totals[number]) / whole
        side.times_us.append((float(medians[number]) / 1e3, int(counts[number])))
    return sides


def _contexts(trace: Trace) -> dict[int, Mapping[str, Any]]:
    """By signature, the settings of its first call."""
    context_of = {scope.number: scope.context for scope in trace.scopes}
    first = trace.own_calls.drop_duplicates("signature")
    pairs = zip(first["signature"].tolist(), first["scope"].tolist(), strict=True)
    return {signature: trace.contexts.get(context_of.get(scope) or 0, {}) for signature, scope in pairs}


def _row(key: str, sides: tuple[_Side, _Side], traces: tuple[Trace, Trace], tolerances: Tolerances) -> Row:
    before, after = sides
    signature = (before.signatures or after.signatures)[0]
    values: tuple[tuple[int, str, Any, Any], ...] = ()
    kinds: list[str] = []
    if not before.count or not after.count:
        kinds.append(WENT if before.count else CAME)
    else:
        if abs(after.count - before.count) > tolerances.counts * max(before.count, after.count):
            kinds.append(COUNTS)
        if abs(after.share - before.share) > tolerances.shares:
            kinds.append(SHARES)
        models = [list(_models(side.signatures[0], trace.values)) for side, trace in zip(sides, traces, strict=True)]
        values = tuple(_changed_values(models[0], models[1], tolerances.values))
        if values:
            kinds.append(VALUES)
    return Row(
        *(key, signature.op, call_outline(signature), (before.count, after.count), (before.share, after.share)),
        *((before.median_us, after.median_us), values, tuple(kinds)),
    )


def _models(signature: Signature, values: Mapping[int, ValueModel]) -> Iterator[tuple[TensorSpec, ValueModel | None]]:
    for spec in tensors([signature.args, signature.kwargs]):
        yield spec, None if spec.values is None else values.get(spec.values)


def _changed_values(
    before: Sequence[tuple[TensorSpec, ValueModel | None]],
    after: Sequence[tuple[TensorSpec, ValueModel | None]],
    tolerance: float,
) -> Iterator[tuple[int, str, Any, Any]]:
    for place, ((spec, one), (_, other)) in enumerate(zip(before, after, strict=False)):
        if one == other:
            continue
        if one is None or other is None:
            yield place, "model", _name(one), _name(other)
            continue
        statistics = statistics_of(one, spec), statistics_of(other, spec)
        for name, (first, second) in changed_statistics(*statistics, tolerance).items():
            yield place, name, first, second


def _name(model: ValueModel | None) -> str | None:
    return next((name for name, kind in value_models.items() if kind is type(model)), None)
