"""Comparison of two traces or sets of traces: signatures, numbers of calls, shares of time, and values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch

from opgrip.cli.command import printable
from opgrip.cli.output_files import write_json, write_text
from opgrip.errors import UserError, shortened
from opgrip.traces.codec.record_forms import key_of_case
from opgrip.traces.io.foreign_files import format_of
from opgrip.traces.schema.arguments import GeneratorSpec, Opaque, TensorSpec, leaves, tensors
from opgrip.traces.schema.python_objects import children
from opgrip.traces.schema.records import Signature
from opgrip.traces.schema.tensor_specs import memory_dtype, tensor_outline
from opgrip.traces.table.call_table import COUNT, quantiles
from opgrip.traces.table.profiler_labels import STEP_LABEL, own_calls
from opgrip.traces.table.step_starts import reported_starts
from opgrip.traces.table.trace import Trace, load
from opgrip.traces.values import ValueModel, value_models

# Units per which calls are counted: steps if all traces record them, else traces if each side has one, else calls.
STEP, TRACE, CALL = "step", "trace", "call"


@dataclass(slots=True)
class Cases:
    """All calls of one operator with the same arguments on one side of a comparison.

    times_us : for each signature, median time of a call and number of calls
    """

    op: str = ""
    call: str = ""
    count: int = 0
    time_ns: float = 0.0
    models: list[tuple[TensorSpec, ValueModel | None]] = field(default_factory=list)
    times_us: list[tuple[float, int]] = field(default_factory=list)
    call_of_profile: str = ""

    @property
    def median_us(self) -> float | None:
        return max(self.times_us, key=lambda item: item[1])[0] or None if self.times_us else None

    def include(self, other: Cases) -> None:
        self.count += other.count
        self.time_ns += other.time_ns
        self.times_us += other.times_us


@dataclass(slots=True)
class Side:
    cases: dict[str, Cases] = field(default_factory=dict)
    header: Mapping[str, Any] = field(default_factory=dict)
    traces: int = 0
    calls: int = 0
    time_ns: float = 0.0
    steps: int | None = 0

    def add(self, trace: Trace) -> None:
        calls = trace.own_distinct_calls
        counts = calls.groupby("signature")[COUNT].sum()
        medians = quantiles(calls["time_ns"], calls["signature"], calls[COUNT])
        totals = counts * medians if medians.any() else counts.astype(float)
        contexts = _contexts(trace)
        for signature in trace.signatures:
            number = signature.number
            if number not in counts.index:
                continue
            cases = self.cases.setdefault(key_of_case(signature, contexts.get(number, {})), Cases())
            if not cases.count:
                cases.op, cases.call = signature.op, call_outline(signature)
                cases.call_of_profile = call_outline(_as_in_profile(signature))
                cases.models = list(_models(signature, trace.values))
            cases.count += int(counts[number])
            cases.time_ns += float(totals[number])
            cases.times_us.append((float(medians[number]) / 1e3, int(counts[number])))
        self.header = self.header or trace.header
        steps = _steps(trace)
        self.steps = self.steps + steps if self.steps is not None and steps else None
        self.traces += 1
        self.calls += int(counts.sum())
        self.time_ns += float(totals.sum())

    def by_call(self) -> Side:
        joined: dict[str, Cases] = {}
        for cases in self.cases.values():
            key = cases.call_of_profile or cases.call
            joined.setdefault(key, Cases(cases.op, cases.call)).include(cases)
        return replace(self, cases=joined)

    def units(self, unit: str) -> float:
        return max(1, {STEP: self.steps or 0, TRACE: self.traces, CALL: self.calls}[unit])


def unit_of(before: Side, after: Side) -> str:
    if before.steps and after.steps:
        return STEP
    return TRACE if before.traces == after.traces == 1 else CALL


def _steps(trace: Trace) -> int:
    steps = trace.header.get("steps")
    if type(steps) is int:
        return max(steps, 0)
    if "on_demand" not in trace.header:
        if trace.end is None or not trace.end.step_starts_ns:
            return 0
        last_ns = max(
            (int(own["start_ns"].max()) for calls, _ in trace.call_parts() if len(own := own_calls(calls))), default=-1
        )
        return len(reported_starts(trace.end, last_ns))
    return sum(1 for label in trace.labels.index if STEP_LABEL.fullmatch(str(label)))


def _as_in_profile(signature: Signature) -> Signature:
    # profiles have no devices, and record a number that the operator takes as a tensor as a tensor without dimensions
    takes_tensors = signature.op.rpartition(".")[2].startswith(("Tensor", "self"))
    args = tuple(
        Opaque("number")
        if (isinstance(value, int | float | complex) and takes_tensors) or getattr(value, "shape", None) == ()
        else value
        for value in signature.args
    )
    kwargs = {name: value for name, value in signature.kwargs.items() if name != "device"}
    return replace(signature, args=args, kwargs=kwargs)


def _contexts(trace: Trace) -> dict[int, Mapping[str, Any]]:
    context_of = {scope.number: scope.context for scope in trace.scopes}
    first = trace.own_distinct_calls.drop_duplicates("signature")
    pairs = zip(first["signature"].tolist(), first["scope"].tolist(), strict=True)
    return {signature: trace.contexts.get(context_of.get(scope) or 0, {}) for signature, scope in pairs}


def _models(signature: Signature, values: Mapping[int, ValueModel]) -> Iterator[tuple[TensorSpec, ValueModel | None]]:
    for spec in tensors([signature.args, signature.kwargs]):
        yield spec, None if spec.values is None else values.get(spec.values)


SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PATTERN = "*?["


def paths_of(side: Path) -> list[Path]:
    # a folder can also be the trace of another tool
    if side.is_dir() and format_of(side) is None:
        paths = sorted(path for path in side.iterdir() if path.name.endswith(SUFFIXES))
        if not paths:
            raise UserError(f"{side} contains no traces", f"names of traces end in {', '.join(SUFFIXES)}")
        return paths
    if not side.exists() and any(letter in side.name for letter in PATTERN):
        paths = sorted(side.parent.glob(side.name))
        if not paths:
            raise UserError(f"no file matches {side}", "name a trace, a folder of traces, or a pattern of file names")
        return paths
    return [side]


def load_side(paths: list[Path], partial: bool, unbounded: bool) -> Side:
    side = Side()
    for path in paths:
        side.add(load(path, partial, unbounded))
    return side


MOST = 400  # maximum number of characters of a call's arguments
MOST_LEAVES = 60  # maximum number of arguments that an outline lists one by one


def outline(value: Any) -> str:
    many = sum(1 for _ in islice(leaves(value), MOST_LEAVES + 1)) > MOST_LEAVES
    return shortened(
        _short(value) if not many else f"{', '.join(map(_short, islice(leaves(value), MOST_LEAVES)))}, ...", MOST
    )


def _short(value: Any) -> str:
    match value:
        case TensorSpec():
            return tensor_outline(value.dtype, value.shape)
        case Opaque(name):
            return f"<{name}>"
        case GeneratorSpec(device):
            return f"generator of {device}"
        case str():
            return repr(value)
        case list():
            return f"[{', '.join(map(_short, value))}]"
        case tuple():
            return f"({', '.join(map(_short, value))})"
        case dict():
            return f"{{{', '.join(f'{_short(key)}: {_short(item)}' for key, item in value.items())}}}"
    inner = children(value)
    return str(value) if inner is None else f"{type(value).__name__}({', '.join(map(_short, inner))})"


def call_outline(signature: Signature) -> str:
    words = [f"{name}={outline(value)}" for name, value in signature.kwargs.items()]
    return f"{signature.op}({shortened(', '.join([*map(outline, signature.args), *words]), MOST)})"


# number of values drawn from a model; the standard error of their mean is a sixty-fourth of their spread
SAMPLED = 4096
SEED = 0

Statistics = Mapping[str, float]


def statistics_of(model: ValueModel, spec: TensorSpec) -> Statistics:
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
    least : share of the time, 0 to 1, below which a signature's number of calls is not compared
    """

    counts: float = 0.0
    shares: float = 0.05
    values: float = 0.1
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class SignatureRow:
    """Comparison of one signature; a pair has a value of each side.

    values : statistics that changed, as (index of the tensor, name of the statistic, value before, value after)
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
    op: str
    shares: tuple[float, float]
    call_shares: tuple[float, float]


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """Differences between two sides, each of which is one or more traces.

    facts : header fields that differ, as (name, value before, value after)
    by_call : True if strides, settings and values were ignored, because different tools recorded the two sides
    """

    names: tuple[str, str]
    facts: list[tuple[str, Any, Any]]
    rows: list[SignatureRow]
    unit: str = TRACE
    units: tuple[float, float] = (1, 1)
    operators: list[OperatorRow] = field(default_factory=list)
    by_call: bool = False

    def of_kind(self, kind: str) -> list[SignatureRow]:
        return [row for row in self.rows if kind in row.kinds]

    @property
    def changed(self) -> list[SignatureRow]:
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
    facts = [(name, before.header.get(name), after.header.get(name)) for name in FACTS]
    facts = [fact for fact in facts if fact[1] != fact[2]]
    units = before.units(unit), after.units(unit)
    return TraceDifference(names, facts, rows, unit, units, list(_operators(rows, tolerances)), by_call)


def _side_of(traces: Iterable[Trace]) -> Side:
    side = Side()
    for trace in traces:
        side.add(trace)
    return side


def _operators(rows: Iterable[SignatureRow], tolerances: Tolerances) -> Iterator[OperatorRow]:
    by_op: dict[str, list[SignatureRow]] = {}
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


def _row(key: str, before: Side, after: Side, unit: str, tolerances: Tolerances) -> SignatureRow:
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
    return SignatureRow(
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
    """Write all rows as JSON if the path ends in `.json`, else the rows that differ as Markdown."""
    if path.suffix == ".json":
        write_json(difference.as_json(), path, force)
    else:
        write_text("\n".join([*_as_markdown(difference), ""]), path, force)


def values_text(row: SignatureRow) -> str:
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
