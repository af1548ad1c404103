"""Comparison of two traces or sets of traces: signatures, numbers of calls, shares of time, and values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch

from opgrip.cli.command import printable
from opgrip.cli.output_files import write_json, write_text
from opgrip.traces.analysis.difference_sides import TRACE, Cases, Side, unit_of
from opgrip.traces.schema.arguments import TensorSpec
from opgrip.traces.schema.tensor_specs import memory_dtype
from opgrip.traces.table.trace import Trace
from opgrip.traces.values import ValueModel, value_models

# number of values drawn from a model; the standard error of their mean is a sixty-fourth of their spread
SAMPLED = 4096
SEED = 0

Statistics = Mapping[str, float]


def statistics_of(model: ValueModel, spec: TensorSpec) -> Statistics:
    """Return statistics of values drawn from a value model; empty if no values can be drawn."""
    generator = torch.Generator().manual_seed(SEED)
    shape = spec.shape if prod(spec.shape) <= SAMPLED else (SAMPLED,)
    if 0 in shape:
        return {}
    try:
        drawn = model.draw(shape, memory_dtype(spec.dtype), generator)
    except (RuntimeError, ValueError, OverflowError, IndexError, NotImplementedError):
        # numbers of an untrusted file may not fit the tensor
        return {}
    values = (torch.view_as_real(drawn.to(torch.complex128)) if drawn.is_complex() else drawn.double()).reshape(-1)
    finite = values[values.isfinite()]
    shares = {
        "zeros": float((values == 0).double().mean()),
        "nan": float(values.isnan().double().mean()),
        "inf": float(values.isinf().double().mean()),
    }
    if not len(finite):
        return shares
    low, high = (float(bound) for bound in torch.aminmax(finite))
    mean, std = float(finite.mean()), float(finite.std(correction=0))
    return {"mean": mean, "std": std, "low": low, "high": high, **shares}


def changed_statistics(before: Statistics, after: Statistics, tolerance: float) -> dict[str, tuple[float, float]]:
    """Return the statistics that changed, with their values before and after.

    A mean or standard deviation changed if the difference exceeds `tolerance` times the standard deviation, the lowest
    or highest value if it exceeds ten times this limit, and a share if it exceeds `tolerance`.
    """
    changed = {}
    spread = max(before.get("std", 0.0), after.get("std", 0.0))
    scale = max(spread, 1e-6 * max(abs(before.get("mean", 0.0)), abs(after.get("mean", 0.0))))
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        if one is None or other is None:
            continue
        unit = 1.0 if name in ("zeros", "nan", "inf") else scale
        # the ends of a range depend on single values
        allowed = tolerance * unit * (10 if name in ("low", "high") else 1)
        if one != other and not (isfinite(one) and isfinite(other) and abs(one - other) <= allowed):
            changed[name] = (one, other)
    return changed


CAME, WENT, COUNTS, SHARES, VALUES = "came", "went", "counts", "shares", "values"
KINDS = (CAME, WENT, COUNTS, SHARES, VALUES)  # kinds of differences between signatures
# header fields that are compared
FACTS = ("opgrip", "torch", "python", "model", "run", "device", "devices", "seed", "steps", "command")


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Limits up to which differences between two traces are not reported.

    counts : difference in the number of calls, relative to the larger number
    shares : difference in the share of the total time, 0 to 1
    values : difference in statistics of values, relative to the spread of the values
    least : smallest share of the total time, 0 to 1, of a signature whose number of calls is compared
    """

    counts: float = 0.0
    shares: float = 0.05
    values: float = 0.1
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """Comparison of one signature; pairs are of both sides.

    key : text that identifies the signature in all traces
    shares : shares of each side's time, 0 to 1
    values : statistics that changed, as (index of the tensor, name of the statistic, value before, value after)
    kinds : kinds of differences, out of `KINDS`
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
class OperatorRow:
    """An operator whose share of the time or of the calls changed, summed over all shapes; shares are 0 to 1."""

    op: str
    shares: tuple[float, float]
    call_shares: tuple[float, float]


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """Differences between two sides, each of which is one or more traces.

    facts : header fields that differ, as (name, value before, value after)
    rows : all signatures, largest change of time first
    unit : unit per which calls are counted: `step`, `trace` or `call`
    units : number of these steps, traces or calls on each side
    by_call : True if strides, settings and values were ignored, because one side is a file of another tool
    """

    names: tuple[str, str]
    facts: list[tuple[str, Any, Any]]
    rows: list[Row]
    unit: str = TRACE
    units: tuple[float, float] = (1, 1)
    operators: list[OperatorRow] = field(default_factory=list)
    by_call: bool = False

    def of_kind(self, kind: str) -> list[Row]:
        return [row for row in self.rows if kind in row.kinds]

    @property
    def changed(self) -> list[Row]:
        return [row for row in self.rows if row.kinds]

    def as_json(self) -> dict[str, Any]:
        return {
            "traces": list(self.names),
            "facts": [{"name": name, "a": one, "b": other} for name, one, other in self.facts],
            "per": {"unit": self.unit, "a": self.units[0], "b": self.units[1]},
            "operators": list(map(asdict, self.operators)),
            "counts": {kind: len(self.of_kind(kind)) for kind in KINDS},
            "signatures": [
                {
                    **asdict(row),
                    "values": [
                        dict(zip(("tensor", "statistic", "a", "b"), value, strict=True)) for value in row.values
                    ],
                }
                for row in self.rows
            ],
        }


def compare_traces(
    before: Trace | Sequence[Trace],
    after: Trace | Sequence[Trace],
    names: tuple[str, str],
    tolerances: Tolerances = Tolerances(),
) -> TraceDifference:
    sides = [_side_of([side] if isinstance(side, Trace) else side) for side in (before, after)]
    return compare_sides(sides[0], sides[1], names, tolerances)


def compare_sides(
    before: Side, after: Side, names: tuple[str, str], tolerances: Tolerances = Tolerances()
) -> TraceDifference:
    by_call = before.header.get("converted_from") != after.header.get("converted_from")
    if by_call:
        before, after = before.by_call(), after.by_call()
    unit = unit_of(before, after)
    keys = dict.fromkeys((*before.cases, *after.cases))
    rows = [_row(key, before, after, unit, tolerances) for key in keys]
    rows.sort(key=lambda row: (not row.kinds, -abs(row.shares[1] - row.shares[0]), -max(row.shares), row.key))
    facts = list(_facts(before.header, after.header))
    units = before.units(unit), after.units(unit)
    return TraceDifference(names, facts, rows, unit, units, list(_operators(rows, tolerances)), by_call)


def _side_of(traces: Iterable[Trace]) -> Side:
    side = Side()
    for trace in traces:
        side.add(trace)
    return side


def _facts(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in FACTS:
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


def _operators(rows: Iterable[Row], tolerances: Tolerances) -> Iterator[OperatorRow]:
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(row.op, []).append(row)
    calls = [max(1, sum(row.counts[side] for own in by_op.values() for row in own)) for side in (0, 1)]
    changed = []
    for op, own in by_op.items():
        before, after = (sum(row.shares[side] for row in own) for side in (0, 1))
        of_before, of_after = (sum(row.counts[side] for row in own) / calls[side] for side in (0, 1))
        if max(abs(after - before), abs(of_after - of_before)) > tolerances.shares:
            changed.append(OperatorRow(op, (before, after), (of_before, of_after)))
    yield from sorted(changed, key=lambda row: (-abs(row.shares[1] - row.shares[0]), row.op))


def _row(key: str, before: Side, after: Side, unit: str, tolerances: Tolerances) -> Row:
    one, other = (side.cases.get(key, Cases()) for side in (before, after))
    shares = one.time_ns / max(before.time_ns, 1e-9), other.time_ns / max(after.time_ns, 1e-9)
    values: tuple[tuple[int, str, Any, Any], ...] = ()
    kinds: list[str] = []
    if not one.count or not other.count:
        if max(shares) >= tolerances.least:
            kinds.append(WENT if one.count else CAME)
    else:
        rates = one.count / before.units(unit), other.count / after.units(unit)
        # ignore rounding of rates
        moved = abs(rates[1] - rates[0]) > (tolerances.counts + 1e-9) * max(rates)
        if moved and max(shares) >= tolerances.least:
            kinds.append(COUNTS)
        if abs(shares[1] - shares[0]) > tolerances.shares:
            kinds.append(SHARES)
        values = tuple(_changed_values(one.models, other.models, tolerances.values))
        if values:
            kinds.append(VALUES)
    first = one if one.count else other
    return Row(
        key,
        first.op,
        first.call,
        counts=(one.count, other.count),
        shares=shares,
        median_us=(one.median_us, other.median_us),
        values=values,
        kinds=tuple(kinds),
    )


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


def write_difference(difference: TraceDifference, path: Path, force: bool) -> None:
    """Write all rows to a `.json` file, or the rows that differ to a Markdown file."""
    if path.suffix == ".json":
        write_json(difference.as_json(), path, force)
    else:
        write_text("\n".join([*_as_markdown(difference), ""]), path, force)


def values_text(row: Row) -> str:
    """Return the statistics that changed in a row as text, such as `tensor 0 mean 0.5 → 0.7`."""
    return ", ".join(
        f"tensor {place} {name} {_number(one)} → {_number(other)}" for place, name, one, other in row.values
    )


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _as_markdown(difference: TraceDifference) -> Iterator[str]:
    before, after = map(_cell, difference.names)
    yield f"# {before} → {after}"
    yield ""
    yield ", ".join(f"{kind} {len(difference.of_kind(kind))}" for kind in KINDS)
    yield ""
    for name, one, other in difference.facts:
        yield f"- {name}: {_cell(one)} → {_cell(other)}"
    yield ""
    if difference.operators:
        yield "| operator | share of time | share of calls |"
        yield "| --- | ---: | ---: |"
        for item in difference.operators:
            shares, calls = (f"{one:.1%} → {other:.1%}" for one, other in (item.shares, item.call_shares))
            yield f"| `{_cell(item.op)}` | {shares} | {calls} |"
        yield ""
    yield "| what | calls | share | call | values |"
    yield "| --- | ---: | ---: | --- | --- |"
    for row in difference.changed:
        counts = f"{row.counts[0]:,} → {row.counts[1]:,}"
        shares = f"{row.shares[0]:.1%} → {row.shares[1]:.1%}"
        yield f"| {', '.join(row.kinds)} | {counts} | {shares} | `{_cell(row.call)}` | {_cell(values_text(row))} |"


def _cell(value: Any) -> str:
    text = printable(value if isinstance(value, str) else json.dumps(value, default=str))
    return text.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
